# ruff: noqa: SIM905 - a list literal would put one word a line
"""Word sets of the nano language: every value a fact can take comes from here (plain data)."""


def _phrases(text: str) -> list[str]:
    return text.replace("\n", " ").split("|")


NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olga Paul Rosa Sam Tina
Victor Wendy Adam Bella Carl Diana Eric Fiona George Hanna Ivan Julia Kevin Laura Martin Nina Oscar Petra Quinn
Robert Sara Thomas Ursula Vera Walter Alice Bruno Celia Daniel Elena Frank Gloria Hugo Irene James Kate Lucas
Mona Nathan Olive Peter Rachel Simon Teresa Amy Boris Cora Edith Fred Gina Harold Ida Jonas Klara Louis Marta
Nicole Otto Paula Ralph Sofia Tom Viola William Agnes Bernard Chloe Doris Edgar Flora Helen Isaac Linda Mark
Nora Owen Polly Richard Stella Tony Violet Albert Betty Cecil Dora Frida Gordon Heidi Ingrid Joseph Leonard
Mabel Norman Patrick Rita Stefan Tessa Vivian Andrew Brenda Charles Edward Hazel Keith Lydia Miles Nancy Philip
Ruth Stanley Arthur Bonnie Daisy Holly Jasper Molly Roger Susan Theo Warren Angela Barry Connie Derek Elsa Kurt
Lena Naomi Oliver Pearl Wanda""".split()

CITIES = """Paris London Rome Madrid Berlin Vienna Prague Warsaw Lisbon Dublin Oslo Athens Cairo Tokyo Delhi
Lima Boston Denver Seattle Chicago Toronto Sydney Geneva Zurich Milan Venice Naples Munich Hamburg Riga Helsinki
Bergen Malta Tunis Nairobi Lagos Osaka Seoul Hanoi Manila Jakarta Havana Bogota Santiago Oxford York Phoenix
Detroit Miami Atlanta""".split()

JOBS = """baker painter teacher doctor farmer sailor lawyer tailor butcher driver pilot nurse singer dancer
writer actor miner hunter gardener plumber carpenter mason weaver barber banker broker chemist dentist tutor
librarian editor printer jeweler florist cook miller shepherd soldier clerk mechanic engineer architect musician
drummer sculptor""".split()

ANIMALS = """cat dog horse rabbit parrot turtle hamster goat sheep donkey duck goose hen pigeon owl falcon fox
lizard snake frog beaver mouse raven swan monkey camel""".split()

FOODS = """apples pears plums cherries grapes lemons oranges bananas peaches figs dates nuts bread butter cheese
milk cream eggs honey jam sugar salt pepper rice beans carrots onions garlic pumpkin olives pasta soup tea
coffee cocoa ham bacon trout salmon shrimp""".split()

COLOURS = """red blue green yellow black white brown grey pink purple silver golden orange violet copper crimson
ivory turquoise scarlet bronze""".split()

OBJECTS = """box lamp door chest bag book clock key ring chair table bottle cup jar basket boat bicycle cart
ladder mirror piano violin drum flute kettle candle vase coat hat scarf glove boot umbrella hammer saw shovel
rope tent map compass safe drawer trunk wallet""".split()

ROOMS = """kitchen cellar attic garden garage library hall office bedroom bathroom stable barn workshop tower
chapel pantry laundry nursery studio balcony terrace courtyard cabin shed vault lobby gallery theatre harbour
museum school station hospital market bakery tavern""".split()

SECRETS = """amber anchor arrow autumn beacon blossom bridge bubble cactus canyon castle cedar cloud clover
comet coral cotton crystal desert diamond dragon eagle ember feather forest fountain galaxy ginger glacier
horizon island ivy jungle kingdom lagoon lantern legend lotus maple marble meadow mercury meteor mountain nectar
nickel ocean opal orchid palace pepper pine planet prism puzzle rainbow ribbon river rocket ruby sapphire shadow
signal spiral spring statue sunset temple thunder timber topaz torch tulip valley velvet violet whistle willow
winter wizard""".split()

MONTHS = "January February March April May June July August September October November December".split()

SUBJECTS = _phrases("""the old man|the young woman|a quiet child|the captain|my neighbour|the tall stranger|a
small bird|the tired traveller|the postman|our teacher|the children|two sisters|the mayor|a friendly
merchant|the night watchman|the crowd|an old friend|the cook|the musicians|the shopkeeper""")

VERBS = _phrases("""walked slowly|waited for an hour|looked at the sky|told a long story|laughed and went
home|sat down to rest|sang a song|counted the windows|watched the rain|read a letter|lost the way|spoke about
the weather|bought some paper|closed the shutters|listened to the wind|slept until noon|made a fire|crossed the
road|asked for water|carried the wood""")

WHERE = _phrases("""near the old bridge|by the river|in the village|on the hill|behind the church|at the
crossroads|under the trees|along the coast|beside the mill|in front of the inn|outside the town|at the end of
the street|close to the lake|between the fields|on the way back""")

WHEN = _phrases("""in the morning|in the evening|after lunch|before sunrise|on a cold day|last week|during the
storm|late at night|on the first day|early in the year|after the long winter|at noon|when the bells rang|some
time later""")

REMARKS = _phrases("""Nothing else happened that day.|It was a quiet week.|The weather stayed dry.|Nobody knew
why.|The road was empty.|It rained again.|Everybody was tired.|The days were getting shorter.|There was not much
to see.|The news came late.|We went on.|That was all.""")
