"""Plain `nn.Module` architectures, one a file. They know no dtype: precision is applied from outside."""
