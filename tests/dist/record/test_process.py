"""`evenroute record` in the modes per_pass and per_token on a job of real processes, a kill -9 included."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.store.source import read_store
from evenroute.eplb.store.writer import StoreReader
from support.command import Outcome, assert_one_line_error, evenroute
from support.control_plane import RebalancerProcess, patience, wait_for
from support.record_job import RecordJob

# Full plans at short intervals: slots move while ids are recorded as physical ones.
FLAGS = ["--interval", "1s", "--policy", "global"]


def files_of(folder: Path, rank: int) -> list[Path]:
    parts = {
        int(m[1] or 1): p
        for p in folder.iterdir()
        if (m := re.fullmatch(rf"x-rank{rank}(?:\.part(\d+))?\.evd", p.name))
    }
    return [parts[number] for number in sorted(parts)]


def counted(ids: np.ndarray, experts: int) -> np.ndarray:
    """[L, T, K] -> [L, E]."""
    return np.stack([np.bincount(row[row >= 0], minlength=experts) for row in ids.reshape(len(ids), -1)])


def start(rebalancer: RebalancerProcess, mode: str, name: str) -> Outcome:
    """`record start`, which waits for what all ranks say: for as long as a busy host takes."""
    return evenroute("record", "start", rebalancer.address, "--mode", mode, "--name", name, "--timeout", 60)


def kill_while_it_writes(process: subprocess.Popen[bytes], folder: Path, rank: int) -> None:
    """SIGKILL at a moment when a part is open: between two parts there is none for an instant."""

    def frozen_with_a_part() -> bool:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: stopped(process.pid), 60, "the rank stands still")
        if any(path.name.startswith(".") and f"-rank{rank}." in path.name for path in folder.iterdir()):
            return True
        process.send_signal(signal.SIGCONT)
        return False

    wait_for(frozen_with_a_part, 60, "an open part")
    process.kill()


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def check_stored(job: RecordJob, store: Path) -> None:
    """Window totals go on beside a recording: all that was routed is in the store, once."""
    with StoreReader(store) as reader:
        _, stored = reader.total_counts()
    routed = sum(
        counted(ids, job.options.num_experts) for rank in range(2) for ids in job.routed(rank).values()
    )
    np.testing.assert_array_equal(stored, routed)


def check_in_use(job: RecordJob, store: Path, maps: set[bytes]) -> None:
    """The store knows what the ranks routed with: their own keys and rows, from the first window on."""
    used = read_store(store)
    assert used.placements_are == "in use"
    keys = {f"({event.epoch}, {event.version})" for event in used.placements}
    logged = {key for _, _, _, key in job.rows(0)}
    assert len(keys & logged) > 3
    assert keys <= logged | {"(0, 0)"}
    known = {event.placement.physical_to_logical.tobytes() for event in used.placements}
    assert len(known & maps) > 1  # those recorded by the ranks themselves, while they recorded
    facts = evenroute("inspect", store, "--json").json["sources"][0]
    assert facts["num_windows_without_placement"] == 0
    assert facts["placement"] == "the placements in use, as recorded"


def test_ids_of_every_token_over_switches_and_a_killed_rebalancer(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    rebalancer = RebalancerProcess(tmp_path, flags=FLAGS)
    with rebalancer:
        agent = {"rebalancer": rebalancer.address, "record_dir": str(records), "record_part_bytes": 65536}
        # Switches come every 4 steps, dummies every 5: some switch at a step that is not recorded.
        with RecordJob(tmp_path, 2, agent=agent, uncounted_every=5) as job:
            job.wait_more(20)
            started = start(rebalancer, "per_token", "x")
            assert (started.status, started.err) == (0, ""), started
            assert "2 ranks record" in started.out
            assert str(records / "x-rank0.evd") in started.out
            begun = [len(job.rows(rank)) for rank in range(2)]
            assert evenroute("record", "start", rebalancer.address).status == 2  # one at a time
            job.wait_more(60)
            kill_at = len(job.rows(0))
            rebalancer.kill()
            job.wait_more(60)  # nobody is there, and both route and record
            rebalancer.start()
            wait_for(lambda: rebalancer.status().state == "serving", 60, "the next life")
            wait_for(
                lambda: all(r.recording is not None for r in rebalancer.status().ranks),
                30,
                "the ranks' reports",
            )
            text = evenroute("status", rebalancer.address).out
            assert "recording  on, per_token x: ranks 2 recording" in text
            job.wait_more(60)
            switched = lambda: len({key for *_, key in job.rows(0)[begun[0] :]}) > 3  # noqa: E731
            wait_for(switched, 120, "three switches while it records")
            ended = [len(job.rows(rank)) for rank in range(2)]
            stopped = evenroute("record", "stop", rebalancer.address, "--timeout", 60)
            assert (stopped.status, stopped.err) == (0, ""), stopped
            assert len(re.findall(r"^rank \d: ended, [\d,]+ passes", stopped.out, re.MULTILINE)) == 2
            again = evenroute("record", "dump", rebalancer.address)
            assert again.out == stopped.out.partition("\n")[2]
            assert evenroute("record", "dump", rebalancer.address, "-o", tmp_path / "windows.evd").status == 0
            job.wait_more(5)
            assert job.finish() == [0, 0], job.logs()
        for rank in range(2):
            times = [at for _, _, at, _ in job.rows(rank)]
            assert np.diff(times).max() < 3 * patience(), "a rank stood still"
            found = [frame for path in files_of(records, rank) for frame in DumpReader(path).tokens()]
            steps = [frame.step for frame in found]
            assert steps == sorted(set(steps))
            routed = job.routed(rank)
            dropped = [s for s in routed if steps[0] <= s <= steps[-1] and s not in set(steps)]
            notes = [note for path in files_of(records, rank) for note in DumpReader(path).totals.notes]
            assert bool(dropped) == any("passes dropped" in note for note in notes)
            assert len(dropped) <= len(steps) // 10
            # All between the commands is there, the time without a rebalancer too.
            # A step may be under way at the start, and one at the end; beside each may be a dummy.
            assert steps[0] <= begun[rank] + 2
            assert steps[-1] >= ended[rank] - 3
            assert steps[0] < kill_at < steps[-1]
            for frame in found:
                assert np.array_equal(frame.ids, routed[frame.step]), (rank, frame.step)
                rows = routed[frame.step].shape[1]
                if rows:
                    assert frame.token_ids is not None
                    assert frame.positions is not None
                    assert frame.token_ids.tolist() == [frame.step + row for row in range(rows)]
                    assert frame.positions.tolist() == [2 * row + rank for row in range(rows)]
        events = [event for path in files_of(records, 0) for event in DumpReader(path).placements()]
        maps = {event.placement.physical_to_logical.tobytes() for event in events}
        assert len(maps) > 1, "no slot moved: the test shows less than it should"
        check_stored(job, tmp_path / "run.db")
        check_in_use(job, tmp_path / "run.db", maps)
    inspected = evenroute("inspect", records, "--json")
    assert inspected.status == 0, inspected
    facts = inspected.json["sources"][0]
    steps_of = [
        {frame.step for path in files_of(records, rank) for frame in DumpReader(path).tokens()}
        for rank in range(2)
    ]
    expected = sum(counted(job.routed(rank)[step], 16) for rank in range(2) for step in steps_of[rank])
    assert facts["routed"] == int(expected.sum())
    assert facts["tokens"] == sum(job.routed(r)[s].shape[1] for r in range(2) for s in steps_of[r])
    assert (facts["ranks"], facts["ep_size"]) == ([0, 1], 2)
    assert facts["num_incomplete_windows"] == len(steps_of[0] ^ steps_of[1])


def test_counts_of_every_pass_beside_unchanged_windows(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        agent = {"rebalancer": rebalancer.address, "record_dir": str(records), "window_steps": 8}
        # No call of agent.record at all: counts of passes need none.
        with RecordJob(tmp_path, 2, agent=agent, silent=True) as job:
            job.wait_more(20)
            assert start(rebalancer, "per_pass", "x").status == 0
            job.wait_more(80)
            assert evenroute("record", "stop", rebalancer.address, "--timeout", 60).status == 0
            job.wait_more(20)
            assert start(rebalancer, "per_pass", "y").status == 0
            job.wait_more(30)  # this one the ranks end themselves, with the job
            assert job.finish() == [0, 0], job.logs()
        for rank in range(2):
            routed = job.routed(rank)
            for name, least in (("x", 70), ("y", 20)):
                windows = list(DumpReader(records / f"{name}-rank{rank}.evd").windows())
                covered = [s for w in windows for s in range(w.first_step, w.last_step + 1)]
                assert covered == list(range(covered[0], covered[-1] + 1))
                assert len(covered) >= least
                for window in windows:
                    passes = [routed[s] for s in range(window.first_step, window.last_step + 1)]
                    assert np.array_equal(window.counts, sum(counted(ids, 16) for ids in passes))
                    assert window.tokens == sum(ids.shape[1] for ids in passes)
            assert covered[-1] == max(routed), "the job's last pass is missing"
        check_stored(job, tmp_path / "run.db")
        with StoreReader(tmp_path / "run.db") as reader:
            lengths = {row.last_step - row.first_step + 1 for row in reader.windows()}
        assert min(lengths - {min(lengths)} or lengths) >= 8, "a recording changed the windows"


def test_a_killed_rank_loses_one_part_and_the_recording_ends_with_the_job(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        agent = {"rebalancer": rebalancer.address, "record_dir": str(records), "record_part_bytes": 65536}
        with RecordJob(tmp_path, 2, agent=agent, tokens=200) as job:
            job.wait_more(5)
            assert start(rebalancer, "per_token", "x").status == 0
            wait_for(lambda: len(files_of(records, 1)) >= 2, 120, "two whole parts of rank 1")
            kill_while_it_writes(job.processes[1], records, 1)
            assert job.processes[0].wait(timeout=150) != 0  # its peer is gone
            whole = {0: files_of(records, 0), 1: files_of(records, 1)}
            for rank in range(2):
                routed = job.routed(rank)
                steps = [frame.step for path in whole[rank] for frame in DumpReader(path).tokens()]
                assert len(steps) > 20
                for path in whole[rank]:
                    for frame in DumpReader(path).tokens():
                        if frame.step in routed:  # the step of the end may not be in the rank's own log
                            assert np.array_equal(frame.ids, routed[frame.step]), (rank, frame.step)
            assert len(job.rows(0)) - max(s for s in steps) < 400
        left = [path.name for path in records.iterdir() if path.name.startswith(".")]
        assert len(left) == 1, left  # what the killed rank was writing; the other finished its own
        assert "-rank1." in left[0]
        facts = evenroute("inspect", records, "--json").json
        assert facts["sources"][0]["ranks"] == [0, 1]
        assert [left[0] in line for line in facts["unfinished"]] == [True]
        routed = sum((ids >= 0).sum() for rank in range(2) for ids in job.routed(rank).values())
        whole = evenroute("inspect", records, "--unfinished", "--json").json["sources"][0]
        under_way = 2 * 3 * 2 * 202  # of the step at the end
        assert facts["sources"][0]["routed"] <= whole["routed"] <= routed + under_way
        assert rebalancer.status().recording
        (tmp_path / "next").mkdir()
        with RecordJob(tmp_path / "next", 2, agent=agent) as job:
            job.wait_more(5)
            wait_for(lambda: not rebalancer.status().recording, 60, "the recording's end with its job")
            told = evenroute("record", "dump", rebalancer.address).out
            lost = r"rank 1: lost, last told: [\d,]+ passes, .* in \d+ files?, .*x-rank1\.evd and what follows it; "
            lost += r"unfinished: \.x-rank1\*\.partial: its job has ended without a last word of it"
            assert re.search(lost, told), told
            assert "of 2 ranks: " in told
            assert start(rebalancer, "per_token", "x").status == 2
            refused = rebalancer.status()
            assert not refused.recording  # both ranks have files of that name, and write over none
            assert start(rebalancer, "per_token", "y").status == 0


def dumped(rebalancer: RebalancerProcess, folder: Path) -> list[bytes]:
    """The recording's windows: fleet-wide and rank 1's."""
    folder.mkdir()
    for name, flags in (("all", []), ("one", ["--rank", 1])):
        outcome = evenroute("record", "dump", rebalancer.address, "-o", folder / name, *flags)
        assert outcome.status == 0, outcome
    return [(folder / name).read_bytes() for name in ("all", "one")]


def test_a_recording_that_no_rank_can_make_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        refused = evenroute("record", "start", rebalancer.address, "--mode", "per_token")
        assert_one_line_error(refused, "no running job")
        with RecordJob(tmp_path, 2, agent={"rebalancer": rebalancer.address}) as job:
            job.wait_more(20)
            assert evenroute("record", "start", rebalancer.address, "--per-rank").status == 0
            job.wait_more(40)
            assert evenroute("record", "stop", rebalancer.address).status == 0
            before = dumped(rebalancer, tmp_path / "before")
            refused = evenroute("record", "start", rebalancer.address, "--mode", "per_token", "--timeout", 60)
            assert refused.status == 2
            lines = refused.err.splitlines()
            assert lines[:2] == [
                f"rank {r}: refused: agent.record_dir is not set on this rank" for r in range(2)
            ]
            assert (
                lines[2]
                == "evenroute: error: no rank records, so the recording was ended; the reasons are above"
            )
            assert_one_line_error(evenroute("record", "stop", rebalancer.address), "no recording runs")
            assert rebalancer.status().recording is False
            assert dumped(rebalancer, tmp_path / "after") == before  # a refused command changed nothing
            job.wait_more(5)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--mode", "per_tokens"], ["--mode", "per_tokens", "stat, per_pass, per_token"]),
        (["--mode", "per_token", "--name", "../x"], ["--name", "../x", "letters"]),
        (["--name", "x"], ["--name", "--mode per_pass or per_token"]),
    ],
)
def test_wrong_words_are_refused_before_anything_is_sent(flags: list[str], parts: list[str]) -> None:
    assert_one_line_error(evenroute("record", "start", "ipc:///nowhere/x.sock", *flags), *parts)
