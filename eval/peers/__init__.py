"""What users would pick instead, for comparisons; needs the extra `peers`."""
