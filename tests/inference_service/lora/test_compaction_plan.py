"""Plans of moves, on small numbers."""

from hypothesis import given
from hypothesis import strategies as st

from inference_service.lora.compaction import Joining, Lack, find_lack, plan_joining
from inference_service.lora.gaps import Range, coalesce, fit

GAPS = (Range(0, 2), Range(8, 10), Range(11, 13), Range(20, 22))


def lack(*sizes: int) -> Lack:
    return find_lack(GAPS, sizes)


def test_what_is_lacking_is_the_largest_that_finds_no_gap() -> None:
    assert lack(2, 2, 2, 1) == (0, (Range(2, 2), Range(10, 10), Range(13, 13), Range(21, 22)))
    assert lack(1, 5, 4) == (5, GAPS)
    assert lack(3, 2) == (3, GAPS)
    assert find_lack((Range(0, 4), Range(6, 8)), (4, 3)) == (3, (Range(4, 4), Range(6, 8)))


def test_the_cheapest_gaps_are_joined() -> None:
    assert plan_joining(GAPS, lack(4), []) == Joining(1, Range(8, 13))
    assert plan_joining(GAPS, lack(5), []) == Joining(7, Range(0, 13))
    assert plan_joining(GAPS, lack(5), [Range(2, 3)]) == Joining(8, Range(8, 22))
    assert plan_joining(GAPS, lack(5), [Range(2, 3), Range(10, 11)]) is None


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.lists(st.integers(0, 39), max_size=3),
)
def test_plans_keep_their_promises(cells: list[int], sizes: list[int], stuck: list[int]) -> None:
    gaps = coalesce(Range(i, i + 1) for i, is_free in enumerate(cells) if is_free)
    short = find_lack(gaps, sizes)
    if fit(gaps, sizes) is not None or not gaps:
        return
    fixed = [Range(i, i + 1) for i in sorted(set(stuck)) if i < len(cells) and not cells[i]]
    stuck_cells = {r.start for r in fixed}
    joining = plan_joining(gaps, short, fixed)
    if joining is not None:
        assert not stuck_cells & set(range(*joining.region))
        assert joining.bytes_moved == sum(not cells[i] for i in range(*joining.region))
        assert sum(cells[i] for i in range(*joining.region)) >= short.size
    elif not fixed:
        assert sum(sizes) > sum(cells)
