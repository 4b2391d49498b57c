"""The text that `probe` reads when it is given none: six plain paragraphs, written for it."""

TEXT = """\
The harbour lies on the north side of the island, where two low hills keep the wind away. In the
morning the ferry brings letters, bread and a few visitors, and at noon it goes back with crates of
fish packed in ice. Most of the houses near the water were built by people who repaired boats. They
had learned to bend wood with steam, and the same curves can be seen in their stairs and doors. One
of the oldest houses is now a small museum. It shows nets, lamps, a compass that no longer points
north, and a long list of every ship that entered the bay during a hundred years.

A good way to learn how a clock works is to take one apart and to put it back together. First there
is the spring, which stores the effort of a hand that turns the key. Then there is a train of
wheels, each one faster than the one before. At the end sits the escapement, which lets a single
tooth pass with every swing of the pendulum. If the pendulum is made longer, the clock runs slower;
if it is made four times as long, each swing takes twice the time. A clock that gains a minute each
day is easier to correct than one that is sometimes fast and sometimes slow, because a steady error
can be measured and removed.

To make soup for four people, cut two onions, three carrots and a piece of celery into small cubes.
Warm some oil in a heavy pot and let the vegetables cook slowly until they are soft. Add a cup of
lentils, a spoon of tomato paste and six cups of water. Do not add the salt yet, because it keeps
the lentils hard. After about forty minutes the soup is ready. Taste it, add salt and a little
vinegar, and serve it with bread. The soup is better on the next day, when the flavours have had
time to mix.

Suppose that a bus leaves the station every twelve minutes and a tram every eighteen minutes, and
that both leave together at eight o'clock. How long does it take until they leave together again?
We look for the smallest number that both twelve and eighteen divide. The multiples of eighteen are
eighteen, thirty-six, fifty-four and so on, and thirty-six is also three times twelve. So the answer
is thirty-six minutes, and the next common departure is at eight thirty-six. In the same way one can
find when three wheels of different sizes will again stand as they stood at the start.

Rain that falls in the mountains does not all run into the river at once. Some of it sinks into the
ground and moves slowly between grains of sand, often for years, before it comes out at a spring.
The water of such a spring has nearly the same temperature in summer and in winter. Trees use the
ground water as well. On a hot day a large oak can lift several hundred litres from its roots to its
leaves, without any pump, only because water leaves the small openings in the leaves and pulls the
next water after it. When a forest is cut down, the river below rises faster after each storm and
carries more soil to the sea.

Before the telephone, people who lived far apart wrote letters and waited. A merchant who wanted to
know the price of wool in another town had to send a question and could expect the answer two weeks
later. By then the price had often changed. Some merchants kept pigeons, others paid riders, and a
few built towers on hills with wooden arms that could be seen from the next tower. A message passed
from tower to tower in minutes, as long as there was no fog. The code was simple: each position of
the arms stood for a number, and each number for a word in a book that both ends owned.
"""
