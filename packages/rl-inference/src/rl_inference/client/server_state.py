"""States of a server as its client sees it, and states of a weight update, each with one table of transitions.

A server:

    | state     | live | next states                             | meaning |
    |-----------|------|-----------------------------------------|---------|
    | starting  | no   | rejoining, leaving                      | its identity is not accepted (yet) |
    | rejoining | no   | starting, serving, paused, evicted, leaving | responds; must serve the committed version |
    | serving   | yes  | staged, paused, evicted, leaving        | gets requests |
    | staged    | yes  | serving, paused, evicted, leaving       | gets requests; has loaded the next version |
    | paused    | yes  | serving, staged, evicted, leaving       | holds its requests for a commit, pause or sleep |
    | evicted   | no   | starting, rejoining, leaving            | failed; its requests continued on other servers |
    | leaving   | no   |                                         | removed; its failures no longer count |

A weight update:

    | state      | next states                    | meaning |
    |------------|--------------------------------|---------|
    | idle       | staged, committing, sleeping   | all live servers serve the committed version |
    | staged     | idle, committing, sleeping     | all live servers can commit the next version |
    | committing | idle                           | live servers are paused and change their weights |
    | sleeping   | idle, staged, committing       | servers have released their memory |

Live servers get requests and take part in weight updates. A state may also follow itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum


class ServerState(StrEnum):
    """State of a server as its client sees it."""

    STARTING = "starting"
    REJOINING = "rejoining"
    SERVING = "serving"
    STAGED = "staged"
    PAUSED = "paused"
    EVICTED = "evicted"
    LEAVING = "leaving"

    @property
    def is_live(self) -> bool:
        """True if the server gets requests and takes part in weight updates."""
        return self in (ServerState.SERVING, ServerState.STAGED, ServerState.PAUSED)


class UpdateState(StrEnum):
    """State of a client's weight update."""

    IDLE = "idle"
    STAGED = "staged"
    COMMITTING = "committing"
    SLEEPING = "sleeping"


_S, _U = ServerState, UpdateState
SERVER_TRANSITIONS = {
    _S.STARTING: frozenset({_S.REJOINING, _S.LEAVING}),
    _S.REJOINING: frozenset({_S.STARTING, _S.SERVING, _S.PAUSED, _S.EVICTED, _S.LEAVING}),
    _S.SERVING: frozenset({_S.STAGED, _S.PAUSED, _S.EVICTED, _S.LEAVING}),
    _S.STAGED: frozenset({_S.SERVING, _S.PAUSED, _S.EVICTED, _S.LEAVING}),
    _S.PAUSED: frozenset({_S.SERVING, _S.STAGED, _S.EVICTED, _S.LEAVING}),
    _S.EVICTED: frozenset({_S.STARTING, _S.REJOINING, _S.LEAVING}),
    _S.LEAVING: frozenset[ServerState](),
}
"""States that may follow each state of a server, besides the state itself."""

UPDATE_TRANSITIONS = {
    _U.IDLE: frozenset({_U.STAGED, _U.COMMITTING, _U.SLEEPING}),
    _U.STAGED: frozenset({_U.IDLE, _U.COMMITTING, _U.SLEEPING}),
    _U.COMMITTING: frozenset({_U.IDLE}),
    _U.SLEEPING: frozenset({_U.IDLE, _U.STAGED, _U.COMMITTING}),
}
"""States that may follow each state of an update, besides the state itself."""


class TransitionError(RuntimeError):
    """State that cannot follow the current one: a bug of the client, never a failure of a server."""


def require_transition[S: StrEnum](transitions: Mapping[S, Set[S]], current: S, following: S, subject: str) -> None:
    """Check that a state can follow the current one.

    Args:
        transitions: `SERVER_TRANSITIONS` or `UPDATE_TRANSITIONS`.
        current: current state.
        following: next state.
        subject: subject of the error message.

    Raises:
        TransitionError: `following` cannot follow `current`.
    """
    if following is not current and following not in transitions[current]:
        raise TransitionError(f"{subject} cannot change from {current} to {following}.")
