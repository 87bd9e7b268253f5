import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what tests share, and with processes of their own
collect_ignore = ["plugin"]  # a package of its own, whose tests run where it is installed: see test_plugin.py
