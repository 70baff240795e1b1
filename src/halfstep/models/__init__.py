"""Plain `nn.Module` architectures, one per file. They know no dtype: precision is applied from outside."""
