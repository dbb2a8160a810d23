"""All ranks issue the same collectives in the same order, or all of them raise the same error.

A rank that calls other modules than the others would gather layer 3 while they gather layer 2: their data would be
mixed, or all would wait for ever. So collectives are *announced* before they are issued: the ranks exchange a digest of
what each is about to do. That would be a round trip for every unit. Therefore the order of a *round*, from one
settlement or evaluation to the next, is remembered; once two rounds that began alike have gone alike, the next one
*follows* it: its beginning and its end are announced, and nothing in between.

A rank that follows and needs something else can't tell the others, who are in the midst of their collectives. It takes
part in what is left of the order, with nothing to say, until all meet at the end; what it gave the others is never
handed over. There each says whether it has left the order, where, and for what. If all have done the same, as when a
model drops layers by a seed that all ranks share, they go on and announce again; if not, all of them raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Callable, Hashable, Protocol

from hyper_parallel.core.errors import CommunicationError, ConfigError

Token = tuple
"""One collective: what is done, the number of the unit, and what else has to be alike."""

END: Token = ("end", -1, ())
FOLLOW_AFTER = 2  # rounds in a row that have gone alike
GIVE_UP_AFTER = 3  # orders that were left: what begins like them differs from time to time
LONGEST = 1 << 16  # tokens of a round that is worth remembering


class Peers(Protocol):
    """The ranks of a model. All of them call together."""

    ranks: tuple[int, ...]

    def exchange(self, value: int) -> list[int]:
        """Everybody's value, below 2**63."""

    def exchange_texts(self, text: str) -> list[str]:
        """Everybody's text."""


@dataclass
class _Known:
    """The last order of rounds that began in one way."""

    tokens: tuple[Token, ...] = ()
    times: int = 0
    left: int = 0

    def learn(self, tokens: tuple[Token, ...]) -> None:
        self.times = self.times + 1 if tokens == self.tokens else 1
        self.tokens = tokens

    @property
    def is_followed(self) -> bool:
        return self.times >= FOLLOW_AFTER and self.left < GIVE_UP_AFTER


class CommonOrder:
    """Holds one rank of a model to the order of all. `describe` puts a token into words, `join` takes part in a
    collective of the others without contents."""

    def __init__(self, peers: Peers, describe: Callable[[Token], str], join: Callable[[Token], None]):
        self._peers = peers
        self._describe = describe
        self._join = join
        self._known: dict[Hashable, _Known] = {}
        self.announced = 0
        """How many exchanges there were."""
        self.disagreements = 0
        """How many of them have found a difference."""
        self._close()

    def _close(self) -> None:
        self._key: Hashable = None
        self._followed: tuple[Token, ...] | None = None
        self._done: list[Token] = []

    def step(self, token: Token, situation: Callable[[], Hashable]) -> None:
        """This rank is about to issue a collective. `situation` is what a round depends on besides its first one.

        Raises:
            ConfigError: the ranks are about to do different things; on every rank.
            CommunicationError: another rank does not say what it is about to do.
        """
        if self._key is None:
            self._begin(token, situation())
        elif self._followed is None:
            self._announce(token, f"about to {self._describe(token)}")
        elif self._followed[len(self._done) : len(self._done) + 1] != (token,):
            self._leave(token)
        if len(self._done) < LONGEST:
            self._done.append(token)

    def end(self) -> None:
        """This rank has issued everything, and will hand over what has come of it. Errors as those of `step`."""
        if self._key is None:
            return
        if self._followed is None:
            self._announce(END, "at the end of its pass")
            if len(self._done) < LONGEST:
                self._known[self._key].learn(tuple(self._done))
        elif len(self._done) < len(self._followed):
            self._leave(END)
        else:
            self._announce((), "going on as in the last passes")
        self._close()

    def _begin(self, token: Token, situation: Hashable) -> None:
        key = (token, situation)
        self._announce(key, f"about to begin a pass and {self._describe(token)}, with {situation}")
        self._key = key
        known = self._known.setdefault(key, _Known())
        self._followed = known.tokens if known.is_followed else None

    def _leave(self, token: Token) -> None:
        """Do what the others expect until they notice, and see whether they have left as well."""
        place, followed = len(self._done), self._followed
        wanted = "stop" if token is END else self._describe(token)
        for each in followed[place:]:
            self._join(each)
        was = self._describe(followed[place]) if place < len(followed) else "stop"
        self._announce(
            (place, token), f"no longer going on as in the last passes: the next was to {was}, and it had to {wanted}"
        )
        known = self._known[self._key]
        known.times, known.left = 0, known.left + 1
        self._followed = None

    def _announce(self, what: Hashable, text: str) -> None:
        self.announced += 1
        try:
            digests = self._peers.exchange(_digest(what))
        except CommunicationError as error:
            raise CommunicationError(
                f"this rank is {text}, and has waited for the other ranks of the model to say the same: {error}"
            ) from error
        if len(set(digests)) == 1:
            return
        self.disagreements += 1
        self._close()
        self._known.clear()
        said: dict[str, list[int]] = {}
        for rank, each in zip(self._peers.ranks, self._peers.exchange_texts(text)):
            said.setdefault(each, []).append(rank)
        lines = "; ".join(f"{_ranks(ranks)} {each}" for each, ranks in said.items())
        raise ConfigError(
            f"the ranks of a sharded model do different things: {lines}. No gradient has been handed over. Every rank "
            "has to run the same units in the same order: run what a rank has no data for on zeros, with a loss of "
            "zero, or make one unit of modules that only some ranks run"
        )


def _digest(what: Hashable) -> int:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
