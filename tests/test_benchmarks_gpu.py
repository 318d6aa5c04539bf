"""benchmarks/gpu.py: what it computes from what it measures. Its parts are tried with --rehearse."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import Bench, read_results, shares_of_ceilings
from benchmarks.gpu_idle import busy_us, longest_gaps_us
from benchmarks.host_step import measure


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [(10.0, 14.0), (0.0, 5.0), (3.0, 8.0), (11.0, 12.0), (20.0, 21.0)]
    assert busy_us(spans) == 8 + 4 + 1
    assert longest_gaps_us(spans) == [6.0, 2.0]
    assert busy_us([]) == 0
    assert longest_gaps_us(spans[:1]) == []


def test_shares_of_what_the_card_reaches() -> None:
    card = {"copy_bytes_per_s": 4e12, "bf16_flops_per_s": 8e14}
    found = {"in": 800, "out": 800, "secs": 2.0, "out_tok_s": 400.0}
    shares = shares_of_ceilings(found, "decode8", int(16e9), card)
    assert shares["share_of_bandwidth"] == pytest.approx(16e9 * (400 / 8) / 4e12)
    assert shares["share_of_flops"] == pytest.approx(2 * 8e9 * 800 / 8e14)
    assert "share_of_bandwidth" not in shares_of_ceilings(found, "prefill8k", int(16e9), card)
    assert shares_of_ceilings(found, "decode8", int(16e9), {}) == {}


def test_a_result_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cuda")
    assert read_results(bench.results) == []
    whole = {"part": "ceilings", "copy_bytes_per_s": 1.0}
    bench.results.write_text(json.dumps(whole) + "\n" + '{"part": "host", "ho')
    assert read_results(bench.results) == [whole]
    assert bench.ceilings() == whole


def test_a_rehearsal_has_a_part_of_every_kind() -> None:
    def kinds(device: str) -> set[str]:
        return {name.rpartition(":")[2].rstrip("0123456789") for name in Bench(Path(), device).parts()}

    missing = kinds("cuda") - kinds("cpu")
    assert {name for name in missing if not name.startswith("test_")} == {
        "nano", "prefill8k", "prefix", "chat", "transformers", "flashinfer", "varlen"
    }  # fmt: skip


def test_the_hosts_part_of_a_step_is_measured_with_a_made_up_device() -> None:
    found = measure(num_rows=3, num_steps=5)
    assert found["step_us"] >= found["worker_us"] > 0
