"""One self-contained HTML page of one or several runs, or of a comparison: no network, no server, light and dark."""
