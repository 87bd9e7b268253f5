"""The agreed language of the rl packages: contracts, data structures and the shared kernel.

Import the module that holds what you need (`rl_contracts.registry`, `rl_contracts.batch.trajectory`, ...). This package
imports nothing by itself, so that its light modules (names, errors, registry, configs) never cost an import of torch.
"""

__version__ = "0.1.0"
