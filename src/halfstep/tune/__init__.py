"""How steps are made fast or small, by measurement: modes, trials, memory levers."""
