"""What checks a method: `fedsim check-method`."""
