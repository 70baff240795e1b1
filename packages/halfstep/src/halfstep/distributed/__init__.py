"""Several processes that train together: how they are launched and how they talk host to host."""
