"""What every other package may use: errors, the console, files, processor cores, seeds, tasks."""
