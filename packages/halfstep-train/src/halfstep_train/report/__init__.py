"""Console, metrics file, pictures: reads events and files, decides nothing."""
