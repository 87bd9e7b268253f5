"""Test classes that any implementation of a contract subclasses, ours or a third party's.

Each module here needs pytest and is imported by tests only. Importing the base class's module under an alias, or
subclassing it as `class TestMine(suite.XxxConformance)`, keeps pytest from collecting the base class itself (its name
does not begin with `Test`).
"""
