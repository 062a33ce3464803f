"""Faults under load: real processes are broken on purpose, and what clients saw is counted.

python -m tests.chaos --list
"""
