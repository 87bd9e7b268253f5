collect_ignore = ["plugin"]  # a package of its own, whose tests run where it is installed: see test_plugin.py
