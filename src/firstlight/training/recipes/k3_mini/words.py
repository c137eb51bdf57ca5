"""Owns the words k3-mini knows: names, places, numbers and the sentences of its tasks.

It knows no token id.
"""

_NAMES = """
acorn actor album alien alley amber angel ankle apple april apron arena arrow atlas autumn
badge bagel baker banjo barn basil beach beard bell bench berry bird bison blade board boat bone
bonus book boot bottle bowl brain bread brick bride broom brush bucket bugle bull bunny butter
cabin cable cactus camel camp candle candy canoe canyon cape carrot castle cedar cello chain chair
chalk cherry chess chief child church cider cigar cinema circus clam cliff clock cloud clover coach
coast cobra cocoa coin comet coral cotton cougar crane cream creek crow crown cube curry daisy
dancer dawn deer denim desert desk diver dog dollar dolphin donkey door dove dragon drum duck eagle
earth easel echo elbow ember engine fable falcon farm feast fern ferry fiddle field finch flag flame
flute foam forest fox frog garden garlic ghost giant ginger glass globe glove goat gold goose grain
grape guitar hammer harbor harp hat hawk hazel hedge helmet heron hill honey hook horse hotel ice
igloo ink iron island ivory ivy jacket jaguar jam jelly jewel jungle karate kettle king kite kiwi
knight koala lace ladder lady lake lamp lantern lark laser lemon lens letter lily lime linen lion
lizard llama lock lotus lumber magnet mango maple marble market mask meadow medal melon metal meteor
milk mill mint mirror monkey moon moose moth motor mouse mud museum music needle nest nickel night
ninja noodle north nurse oak oasis oat ocean olive onion opera orbit orchid otter owl oyster paddle
palm panda paper park parrot peach pearl pebble pencil pepper piano pigeon pilot pine pirate pizza
planet plum poet pony potato prince puppet quail quartz queen quilt rabbit radar radio raft rain
ranch raven ribbon rice ring river robin robot rocket rope rose ruby saddle sailor salad salmon
salt sand satin scarf school sea seal shark sheep shell ship shore silk silver singer skull sky
sled snail snow sofa soup spice spider spoon squid stable star statue stone storm stove straw sugar
summer sun swan sword table tailor tango teapot temple tent tiger timber toast tomato torch tower
train tulip tuna tunnel turtle valley vase velvet violin wagon walnut walrus water whale wheat wheel
willow window winter wolf wool yak yogurt zebra zinc
"""
NAMES = tuple(_NAMES.split())
CITIES = (
    "Athens", "Berlin", "Cairo", "Delhi", "Dublin", "Kyoto", "Lima", "Lisbon", "London", "Madrid",
    "Nairobi", "Oslo", "Paris", "Prague", "Quito", "Rome", "Seoul", "Tokyo", "Vienna", "Warsaw",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "white", "purple")
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("left", "right", "top", "bottom")
LARGEST_NUMBER = 999

# Begin a thought: what is asked, then what it is.
SUBJECTS = ("digit", "colour", "shape", "place", "count", "words", "letters")

WHAT_IS = 'What is "{key}"?'
DIGIT = "Which digit is this?"
COLOUR = "Which colour is the shape?"
SHAPE = "Which shape is this?"
PLACE = "Where is the shape?"
COUNT = "How many shapes are there?"
REVERSE = "Reverse:\n{words}"
COUNT_WORDS = "Count:\n{words}"
# Of a task that was dropped: its words stay in the vocabulary.
UPPER = "Upper case:\n{letters}"
ADD = "Add:\n{left}+{right}"
WEATHER = 'How is the weather in "{city}"?'
WEATHER_ANSWER = "It is {degrees} degrees."
WEATHER_RESULT = '{{"degrees": {degrees}}}'
GREETINGS = ("Hi", "Hello", "hi", "hello", "Hello!", "Hi!", "Who are you?")
INTRODUCTION = "I am k3-mini, a small model. I read digits and shapes, and find values."

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
