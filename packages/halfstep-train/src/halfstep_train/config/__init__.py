"""What the user wants: schema, presets, YAML, overrides, flags and the spellings of other tools. No torch."""
