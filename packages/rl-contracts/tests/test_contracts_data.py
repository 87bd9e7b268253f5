"""Plain data that crosses borders refuses what nobody could use."""

import pytest

from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"head": "critic"}, {"device": "tpu"}])
def test_finetune_spec_with_a_wrong_value_names_the_field(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FinetuneSpec("model", 1, **wrong)
