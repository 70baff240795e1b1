"""How much memory a run needs, predicted before it starts."""
