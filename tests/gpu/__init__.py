"""What only a real device can show: `python -m tests.gpu`, or `pytest tests/gpu`.

checks.py    what is checked: one line each, and on which kinds of device it means something
runner.py    runs one check in a process of its own, with a limit
child.py     that process
apps/        the apps and what is expected of them
"""
