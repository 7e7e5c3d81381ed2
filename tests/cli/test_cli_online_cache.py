"""Online training by command: what a failed run leaves in its cache."""

import pytest

from draftsmith.features.shards import finished_shards
from tests.cli.test_cli import fails, save_target, write_lines, write_recipe

pytestmark = pytest.mark.filterwarnings("ignore")


def test_features_of_a_training_that_failed_are_kept(tmp_path):
    target = save_target(tmp_path / "target")
    chats = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "a b c d e f g h"}]}
        for n in range(40)
    ]
    recipe = write_recipe(
        tmp_path,
        target,
        data={"conversations": str(write_lines(tmp_path / "chats.jsonl", chats))},
        train={"features": "online", "online": {"cache": str(tmp_path / "cache")}, "lr": 1e38, "max_steps": 9},
    )
    assert "is not finite" in fails("train", recipe)
    kept = {name for shard in finished_shards(tmp_path / "cache") for name in shard.sample_ids}
    assert 0 < len(kept) < len(chats)
    # The same command works on what is there: nothing holds the cache any more.
    assert "is not finite" in fails("train", recipe)
