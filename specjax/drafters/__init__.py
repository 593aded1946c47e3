"""Drafters: one file each, and the names they are found by."""
