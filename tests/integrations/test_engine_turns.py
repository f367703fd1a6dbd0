"""ci/engines: engines that are timed on one GPU take turns."""

import threading
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "ci" / "engines"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_who_is_timed_waits_for_all_engines_of_its_step(tools, tmp_path):
    """For one that ends or fails without a turn of its own, too."""
    import engine  # noqa: PLC0415

    def args(name: str, *more: str):
        arguments = ["--who", "ours", "--out", str(tmp_path / name), "--turns", str(tmp_path / "turns")]
        return engine.parse([*arguments, "--of", "1", *more])

    def timed(args):
        with engine.turn(args):
            return {"others": len(list(args.turns.iterdir()))}

    assert engine.write_result(timed, args("timed", "--batches", "8"))
    assert "others" in (tmp_path / "timed").read_text()
    for path in (tmp_path / "turns").iterdir():
        path.unlink()
    assert not engine.write_result(lambda args: 1 / 0, args("failed"))
    rounds = sorted(path.name.split(".")[1] for path in (tmp_path / "turns").iterdir())
    assert rounds == [str(round_) for round_ in range(engine.ROUNDS + 1)]


def test_first_tokens_are_timed_in_rounds_of_all_engines(tools, tmp_path, monkeypatch):
    import engine  # noqa: PLC0415

    turns, calls, results = tmp_path / "turns", [], []
    arguments = ["--who", "ours", "--out", str(tmp_path / "out"), "--turns", str(turns), "--of", "2"]
    monkeypatch.setattr(engine, "generate", lambda llm, ids, new: calls.append(ids[0]))
    monkeypatch.setattr(engine.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    thread = threading.Thread(
        target=lambda: results.append(engine.first_token(None, engine.parse(arguments)))
    )
    thread.start()
    for round_ in range(engine.ROUNDS + 1):
        deadline = time.monotonic() + 20
        while not list(turns.glob(f"ready.{round_}.*")) and time.monotonic() < deadline:
            pass
        assert len(calls) == round_ * engine.FIRST_TOKEN_RUNS and not results
        (turns / f"ready.{round_}.other").touch()
    thread.join(20)
    (found,) = results
    assert len({str(x) for x in calls}) == len(calls)  # none is cached
    assert len(found["rounds"]) == engine.ROUNDS - 1 and found["least"] <= found["median"]
