"""Words the skill generators draw from. Plain data; order matters, for generators are seeded."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
amber ancient black blue bold brave bright broken brown calm clever cold copper crimson dark deep distant
dusty early empty fair fierce frozen gentle golden grand gray green happy heavy hidden hollow humble iron
ivory jolly keen large late little lonely lost loud lucky marble merry mighty misty narrow noble northern
old olive open orange pale plain proud purple quick quiet rapid red rich royal rusty sandy scarlet secret
sharp shining silent silver simple slow small smooth soft southern steady stone strong sunny sweet swift
tall tiny true violet warm western white wide wild winter wise wooden yellow young
""")

NOUNS = _words("""
anchor apple arrow badge barn basket beacon bell bird boat bottle bridge bucket cabin camel candle canyon
castle cedar chair chest circle cliff clock cloud coin compass crown cup desert dog door dragon drum eagle
engine falcon farm feather fence field fish flag flower forest fountain fox garden gate glass goat hammer
harbor hat hawk hill horse house island jacket jar key kite ladder lake lamp lantern leaf letter lion map
market meadow mill mirror moon mountain needle nest oak ocean orchard owl palace path pearl pillar pine
plate pond prairie quarry rabbit raven ribbon ring river road rocket rope rose saddle sail ship shop shore
spear spoon spring stable star station stove stream sword table temple tent tiger tower train tree tunnel
valley vessel village violin wagon wall watch well wheel window wolf yard
""")

NAMES = _words("""
Abel Ada Alice Amos Anna Arthur Boris Carla Cyrus Daniel Diana Edgar Elena Emma Ezra Felix Flora Frank
George Grace Hanna Henry Hugo Ida Irene Isaac Ivan Jacob Jane Joel John Julia Karl Laura Leah Leo Lewis
Lucy Marco Maria Mark Martha Max Miriam Nathan Nina Noah Nora Olga Oscar Paul Peter Rachel Rosa Ruth
Samuel Sarah Simon Sofia Stella Thomas Tobias Ursula Vera Victor Walter Wanda
""")

CITIES = _words("""
Athens Berlin Boston Cairo Chicago Cork Delhi Denver Dublin Geneva Hanoi Havana Helsinki Lagos Lima Lisbon
London Lyon Madrid Milan Moscow Munich Nairobi Naples Oslo Paris Perth Porto Prague Quito Riga Rome Seoul
Seville Sofia Sydney Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw York Zurich
""")

ROOMS = _words("""
attic basement bathroom bedroom cellar garage hall kitchen library nursery office porch studio
""")

ITEMS = _words("""
apples beans books boxes bricks candles chairs coats cups dates eggs figs flowers forks grapes hats keys
knives lamps lemons maps melons nails nuts onions pears pens plates plums ropes shirts shoes spoons stamps
tables tiles
""")

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _words("""
January February March April May June July August September October November December
""")

_PAIRS = _words("""
hot/cold big/small up/down left/right old/young light/dark fast/slow high/low rich/poor open/closed
full/empty good/bad day/night wet/dry hard/soft long/short near/far first/last
""")
OPPOSITES = tuple((a, b) for a, b in (pair.split("/") for pair in _PAIRS))

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Longspan, a small assistant.",
    "Answer briefly.",
    "Answer the user's questions exactly.",
    "You are a careful assistant. Be brief and exact.",
    "Be polite and short.",
)
