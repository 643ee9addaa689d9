"""The links between ranks: who does not come is named, and nobody else's process gets in."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid

import pytest
import torch

from tests.fakes import wait_until
from vla_async import links
from vla_async.links import FollowingLink, LeadingLinks, RankError
from vla_async.shared_memory import Field, SharedBlock


def address() -> str:
    return f"\0vla_async/test/{uuid.uuid4()}"


def linked(timeout_s: float = 10.0) -> tuple[LeadingLinks, FollowingLink]:
    """Both ends, in this process."""
    here, others = address(), list[FollowingLink]()
    leading = LeadingLinks(2, here, timeout_s)
    thread = threading.Thread(target=lambda: others.append(FollowingLink(1, here, timeout_s)))
    thread.start()
    leading.wait_for_all()
    thread.join()
    return leading, others[0]


def test_messages_and_memory_arrive_in_their_order() -> None:
    leading, following = linked()
    block = SharedBlock({"a": Field((3,), torch.int64)})
    leading.tell("first", 1)
    leading.share(block)
    leading.tell("second", 2, rank=1)
    assert following.receive("first") == ("first", 1)
    mapped = following.receive()
    assert following.receive("first", "second") == ("second", 2)
    block["a"][1] = 7
    assert mapped["a"].tolist() == [0, 7, 0], "it is a copy"
    following.close()
    leading.close()
    assert leading.trouble is None


def test_a_message_that_nobody_expects_is_refused() -> None:
    leading, following = linked()
    leading.tell("slab")
    with pytest.raises(RankError, match="rank 0 said 'slab' when rank 1 expected update or stop"):
        following.receive("update", "stop")
    following.close()
    leading.close()


def test_rank_0_that_says_nothing_is_not_waited_for_for_ever() -> None:
    leading, following = linked(timeout_s=0.1)
    with pytest.raises(RankError, match=r"rank 1 waited in vain for rank 0, for trainer.rank_timeout_s=0.1 s"):
        following.receive("update")
    following.close()
    leading.close()


def test_a_rank_that_fails_is_heard_of_with_its_reason() -> None:
    leading, following = linked()
    heard: list[RankError] = []
    leading.alarm = heard.append
    following.fail(KeyError("broken data"))
    wait_until(lambda: bool(heard), "the alarm")
    assert str(leading.cause()).endswith("failed: KeyError: 'broken data'; the run ends")
    following.close()
    leading.close()


def test_a_rank_that_ends_before_it_joins_is_named() -> None:
    leading = LeadingLinks(3, address(), 60.0)
    processes = [subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"]) for code in (4, 4)]
    with pytest.raises(RankError, match=r"rank [12] ended by itself \(exit code 4\) before it joined"):
        leading.wait_for_all(processes)
    leading.close()


def test_ranks_that_do_not_join_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.2)
    leading = LeadingLinks(3, address(), 0.2)
    with pytest.raises(RankError, match=r"rank 1 and 2 did not join within 0.2 s"):
        leading.wait_for_all()
    leading.close()
    with pytest.raises(RankError, match=r"rank 0 was not there within 0.2 s"):
        FollowingLink(1, address(), 60.0)
