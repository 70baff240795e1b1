"""Model code that several families share. Models do not choose dtypes: precision is applied from outside."""
