"""Tests of the validation of plain data types."""

import pytest

from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError


@pytest.mark.parametrize("fields", [{"dtype": "float16"}, {"head": "critic"}, {"device": "tpu"}])
def test_finetune_spec_with_invalid_value_names_field(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        FinetuneSpec("model", 1, **fields)
