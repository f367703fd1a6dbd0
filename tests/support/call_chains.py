"""Random chains of calls over the tokens of a request, for ops that keep a state between calls."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def chains(draw, n: int, most: int, past_end: bool = False):
    """(accepted, rejected) of calls over n tokens: single tokens, drafts, chunks.

    Rejected drafts are at most ``most`` and, without ``past_end``, among the n tokens.
    """
    cuts, rejected = [], []
    while sum(cuts) < n:
        left = n - sum(cuts)
        kind = draw(st.sampled_from(["token", "draft", "chunk"]))
        longest = {"token": 1, "draft": most, "chunk": left}[kind]
        cuts.append(draw(st.integers(1, min(longest, left))))
        room = most if past_end else min(most, n - sum(cuts))
        rejected.append(draw(st.integers(0, room)) if kind == "draft" else 0)
    return cuts, rejected
