"""The `stories` corpus: children's stories written by a seeded program, with their exact law.

Somebody has a thing, loses it, feels bad, is helped, and all ends well. Names, pronouns, the colour and kind of the
thing, the place, the animal and the feeling must agree over the whole story. Because the program is a unifilar
automaton (`automaton.py`), the likelihood of a generated text and the entropy of the data are known exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache, cached_property

import numpy as np
from numpy.typing import ArrayLike

from convergeflow.data.automaton import Grammar
from convergeflow.data.program import Article, Choice, Fact, Line, Mention, Piece, Say, lines, one_of

GIRLS = "mia lily anna rosa clara emma nora ruby ella maya tess ivy lucy hana zoe pia greta wanda sofia june"
BOYS = "tom ben sam leo max finn jack oscar hugo noah paul karl milo emil ravi theo otto luca felix dan"
COLOURS = "red blue green yellow white black pink brown purple golden"
THINGS = "kite ball hat drum book boat ring key cup coat doll bell spoon map lamp whistle button scarf basket puppet"
PLACES = "river park forest school farm market beach bridge castle mill meadow harbour station pond tower hill"
ANIMALS = "dog cat rabbit fox duck bear mouse frog horse bird goat hen pig squirrel turtle badger deer sheep"
FEELINGS = "sad upset lonely worried cross scared gloomy sorry tired unhappy"
HIDING_PLACES = "tree bench stone bush bed chair fence cart log wall rug barrel ladder leaf"
JOYS = "happy glad cheerful proud merry calm thankful jolly"

_PRONOUNS = {"girl": ("she", "her", "her"), "boy": ("he", "his", "him")}


def _falling(words: str) -> dict[str, float]:
    """Probabilities that fall slowly along the list, so that slot marginals show a model that ignores them."""
    names = words.split()
    weights = 1.0 / (np.arange(len(names)) + 4.0)
    shares = weights / weights.sum()
    return {name: float(share) for name, share in zip(names, shares, strict=True)}


def _fact(name: str, words: str) -> Fact:
    shares = _falling(words)
    return Fact(name, tuple(shares), tuple(shares.values()))


def _story_program() -> tuple[Piece, list[Fact]]:
    facts = [
        _fact("girl", GIRLS),
        _fact("boy", BOYS),
        _fact("colour", COLOURS),
        _fact("thing", THINGS),
        _fact("place", PLACES),
        _fact("animal", ANIMALS),
        _fact("feeling", FEELINGS),
    ]
    slots: dict[str, Piece] = {fact.name: Mention(fact.name) for fact in facts[2:]}
    slots["an"] = Article("animal")
    slots["kind"] = one_of(**_falling("kind brave quiet funny gentle curious busy bold"))
    slots["family"] = one_of(**_falling("mother father grandmother uncle sister brother"))
    slots["when"] = one_of(day=0.5, morning=0.2, evening=0.15, afternoon=0.1, night=0.05)
    slots["weather"] = one_of(wind=0.4, rain=0.3, storm=0.2, snow=0.1)
    slots["close"] = one_of(best=0.5, old=0.3, dear=0.2)
    slots["loved"] = one_of(loved=0.6, liked=0.4)
    slots["lost"] = one_of(lost=0.5, dropped=0.3, forgot=0.2)
    slots["by"] = one_of(under=0.5, behind=0.3, beside=0.2)
    slots["hidden"] = one_of(**_falling(HIDING_PLACES))
    slots["thanked"] = one_of(thanked=0.5, hugged=0.3, kissed=0.2)
    slots["joy"] = one_of(**_falling(JOYS))

    # Who the story is about is part of the counter from the first word that tells it; pronouns are plain words.
    after_named, after_name = {}, {}
    for hero, (she, her, of_her) in _PRONOUNS.items():
        own = {**slots, "name": Mention(hero), "she": Say(she), "her": Say(her), "them": Say(of_her), "hero": Say(hero)}
        rest = _rest(own)
        after_named[hero] = Line((lines({"{hero} named {name} .": 1.0}, own), rest))
        opening = lines({"was a {kind} {hero} .": 0.6, "lived with {her} {family} near the {place} .": 0.4}, own)
        after_name[hero] = Line((own["name"], opening, rest))
    size = one_of(little=0.4, small=0.2, young=0.2, clever=0.1, shy=0.1)
    once = Line(
        (lines({"once there was a": 1.0}, slots), size, Choice(((0.5, after_named["girl"]), (0.5, after_named["boy"]))))
    )
    return Choice(((0.5, once), (0.25, after_name["girl"]), (0.25, after_name["boy"]))), facts


def _rest(own: Mapping[str, Piece]) -> Piece:
    """A story after its first sentence: four or five more. They may leave out what was owned, or how it felt."""
    owned = {
        "{she} had a {colour} {thing} .": 0.4,
        "{she} {loved} {her} {thing} .": 0.2,
        "{her} {close} friend was a {animal} .": 0.25,
        "{her} {thing} was {colour} .": 0.15,
    }
    lost = lines(
        {
            "one {when} {she} {lost} {her} {thing} near the {place} .": 0.5,
            "one {when} , the {colour} {thing} was gone .": 0.25,
            "then the {weather} took {her} {colour} {thing} away .": 0.25,
        },
        own,
    )
    felt = {"{she} felt very {feeling} .": 0.4, "{name} was {feeling} .": 0.3, "this made {them} {feeling} .": 0.3}
    found = {
        "{an} {animal} found it {by} the {hidden} .": 0.4,
        "{an} {animal} helped {them} find the {thing} .": 0.25,
        "soon {she} saw the {colour} {thing} {by} the {hidden} .": 0.35,
    }
    ended = lines(
        {
            "{name} {thanked} {an} {animal} .": 0.35,
            "{name} took {her} {thing} home .": 0.15,
            "{she} was no longer {feeling} .": 0.3,
            "now {she} was {joy} .": 0.2,
        },
        own,
    )
    feels, finds = lines(felt, own), lines(found, own)
    # Only a story that said what was owned may leave out what was felt: five sentences at least, six at most.
    long = Line((lines(owned, own), lost, Choice(((0.4, Line((feels, finds))), (0.6, finds))), ended))
    short = Line((lost, feels, finds, ended))
    return Choice(((0.7, long), (0.3, short)))


class StoriesLaw(Grammar):
    """The law of the corpus: draws texts and says how likely any text is. All ids are `numpy` arrays [num, length]."""

    def __init__(self) -> None:
        super().__init__(*_story_program())

    @cached_property
    def groups(self) -> dict[str, list[list[str]]]:
        """For each fact: the words that speak of each of its values."""
        single = {fact.name: [[word] for word in fact.words] for fact in self.facts}
        return {
            "name": single.pop("girl") + single.pop("boy"),
            "gender": [[*GIRLS.split(), "girl", "she", "her"], [*BOYS.split(), "boy", "he", "his", "him"]],
            **single,
        }

    @cached_property
    def sha256(self) -> str:
        """A hash of the whole law: it changes whenever a word or a probability does."""
        digest = hashlib.sha256("\n".join(self.vocabulary).encode())
        for table in (self.arc_probability, self.arc_target, self.arc_fact, self.arc_value, self.starts):
            digest.update(np.ascontiguousarray(table).tobytes())
        return digest.hexdigest()

    def facts_kept(self, ids: ArrayLike) -> dict[str, int]:
        """Repeated mentions of facts, and stories, that agree with the first mention: see `agreement`."""
        return self.agreement(ids, self.groups.values())


@cache
def stories_law() -> StoriesLaw:
    """The one law of the corpus; compiling it takes a moment, so it is kept."""
    return StoriesLaw()
