"""On-disk layouts, one a file; demo data in the same layouts; the loader and the copy to the device."""
