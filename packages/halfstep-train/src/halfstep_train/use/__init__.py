"""A stored run in use: opened, evaluated, asked to predict."""
