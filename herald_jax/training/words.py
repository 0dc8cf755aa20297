"""Word lists of the synthetic documents; every word is written out here, nothing is borrowed.

Keys are an adjective and a noun ("blue harbor"), values are digits or value words. The lists do
not overlap, so a word's part is known from the word alone, as binding in the first layer needs.
"""

# ruff: noqa: SIM905  (lists of words read better as text)
from __future__ import annotations

ADJECTIVES = tuple(
    """
    amber ancient azure bitter black blue brass brave bright broken bronze calm cedar chalk clear
    cobalt cold coral crimson crooked crystal dark deep distant dusty eastern empty faded flat
    foggy frozen gentle golden grand gray green hidden hollow humble icy indigo iron ivory jade
    jolly lonely long lower lucky marble mellow misty narrow noble northern oaken olive outer
    pale plain polar proud purple quiet rapid red royal rugged rusty sandy scarlet secret shady
    sharp silent silver small smooth snowy solid southern steep stony sunny swift tall tawny tiny
    twin upper velvet violet warm western white wide wild windy wooden yellow young
    """.split()
)

NOUNS = tuple(
    """
    abbey acre alley anchor arch arena attic bakery balcony bank barn barrel basin bay beach
    beacon bell bench boat bridge brook cabin camp canal canyon cape castle cave cellar chapel
    cliff clinic coast college corner cottage court cove creek dairy dam delta depot desert dock
    dune factory farm ferry field fjord forest forge fort fountain garden gate glacier glen gorge
    grove gulf hall hamlet harbor hedge hill hotel house hut inlet island jetty kiln kitchen
    lagoon lake lane ledge library lighthouse lodge lounge manor market marsh meadow mill mine
    mint mosque museum oasis office orchard outpost pantry park parlor pass pasture path pier
    pond port prairie quarry quay ranch reef ridge river road school shed shop shore shrine
    smithy square stable station stream street studio summit swamp temple terrace theater tower
    trail tunnel valley vault village villa wall warehouse well wharf window woods workshop yard
    """.split()
)

VALUE_WORDS = tuple(
    """
    acorn almond antler apple apricot badger bamboo banana barley basil bean bear beaver beetle
    berry bison butter camel carrot cat celery cheese cherry chestnut clover cocoa coffee
    copper corn cotton cougar crane cricket crow daisy deer diamond dolphin donkey dove dragon
    duck eagle elephant emerald falcon feather fennel fern ferret fig finch flamingo flax fox
    frog garlic gazelle ginger giraffe goat goose grape hamster hare hawk hazel hedgehog heron
    honey horse jackal jaguar jasmine kiwi koala lantern lemon leopard lily lime linen lion lizard
    llama lobster lotus magpie mango maple marlin melon mole monkey moose moss mushroom nettle
    nutmeg onion opal orange orchid osprey otter owl oyster panda panther papaya parrot parsley
    peach pear pearl pebble pelican penguin pepper pigeon plum poppy potato puffin pumpkin quail
    quartz rabbit raccoon radish raven rice robin rose ruby rye saffron sage salmon sapphire seal
    sesame shark sheep shrimp snail sparrow spinach squid squirrel stork sugar swan tea thyme tiger
    toad tomato topaz trout tulip turkey turnip turtle vanilla walnut walrus whale wheat willow
    wolf yak zebra
    """.split()
)

ATTRIBUTES = (
    "access code",
    "badge number",
    "call sign",
    "gate code",
    "label",
    "locker number",
    "password",
    "phone number",
    "serial number",
    "stamp",
)

PEOPLE = tuple(
    """
    baker carpenter clerk cook doctor driver farmer fisher guard hunter judge mason mayor miller
    nurse painter pilot poet porter sailor singer smith student tailor teacher trader visitor
    weaver writer
    """.split()
)

MANNERS = tuple(
    """
    again alone briefly carefully early eagerly gladly late often once quickly rarely slowly softly
    sometimes soon together twice
    """.split()
)

ACTIONS = tuple(
    """
    bought brought carried cleaned counted drew fetched found held hid kept lifted lost mended moved
    opened packed painted praised repaired saw sold studied took touched washed watched
    """.split()
)

THINGS = tuple(
    """
    basket blanket book bottle box brush bucket candle cart chair clock coat cup curtain drum flag
    glove hammer hat jar kettle key knife ladder lamp letter map mirror needle net paper pen picture
    pipe plate pot rope sack scarf shoe spoon stick stool string table ticket tool wagon wheel
    """.split()
)

TIMES = tuple(
    """
    afternoon autumn dawn dinner evening lunch midnight morning night noon rain spring storm summer
    sunset supper winter
    """.split()
)
