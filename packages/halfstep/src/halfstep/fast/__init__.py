"""Captured steps of users' loops, in reading order. docs/captured_steps.md is their guide.

fast_path.py        choose eager, captured or compiled for each step; replay
compiled_trial.py   when Inductor's code is tried, and whether it is used
parts_trial.py      whether code that is not captured is compiled with graph breaks
compiled_parts.py   compile and compare what lies between two graph breaks
windows.py          the traced calls of a window, and what a graph needs of them
hand_rates.py       settings of optimizers that change while graphs are captured
traced.py           trace a loss function with guards on every Python value it reads
certificate.py      compare a captured step with uncaptured ones before it is used
"""
