"""Slots: objects in video, found without labels."""
