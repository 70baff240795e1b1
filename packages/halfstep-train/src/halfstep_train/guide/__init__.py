"""The interactive way in: questions, a look at the data, suggestions."""
