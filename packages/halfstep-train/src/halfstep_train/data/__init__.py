"""On-disk layouts, one per file; demo data in the same layouts; the loader and the copy to the device."""
