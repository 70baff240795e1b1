"""argv -> calls. No logic here: one file a command, heavy imports inside the functions."""
