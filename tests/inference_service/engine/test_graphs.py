"""Which sizes of decode steps are captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.engine.graphs import SHORT, buckets_up_to, length_classes


@given(st.integers(1, 2000))
def test_every_batch_has_a_bucket_and_is_not_padded_beyond_its_double(most):
    buckets = buckets_up_to(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        assert next(bucket for bucket in buckets if bucket >= size) <= max(2 * size, 1)


@pytest.mark.parametrize(
    ("max_model_len", "classes"), [(1, (1,)), (SHORT, (SHORT,)), (SHORT + 1, (SHORT, SHORT + 1)), (8192, (SHORT, 8192))]
)
def test_length_classes_end_at_the_longest(max_model_len, classes):
    assert length_classes(max_model_len) == classes
