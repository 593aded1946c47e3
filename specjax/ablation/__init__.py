"""Ablations: drafts that differ by the values of some keys of a configuration.

`axes` says which keys and values, `planning` who trains with whom, `students`
trains them together, `scoring` measures and times them, `findings` takes means
over seeds, and `report` and `plots` show them. `eval/ablation.py` does it all.
"""
