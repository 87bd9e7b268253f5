"""Test classes for implementations of the contracts; subclass one to test a built-in or third-party implementation.

The modules here require pytest and are imported by tests only. The base classes are named `XxxConformance`, without
the prefix `Test`, so pytest collects only the subclass, for example `class TestMyEngine(suite.XxxConformance)`.
"""
