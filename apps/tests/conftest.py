import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # report_runs is shared by several test files
