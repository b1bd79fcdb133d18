"""A text of several kinds, over which the queries of a model are measured."""

TEXT = """\
To find the number of apples that are left, we go through the day in order. In the morning there
were 48 apples in the shop. The first customer bought 7, so 48 - 7 = 41 were left. The second one
bought twice as many as the first, which is 14, and 41 - 14 = 27. Wait, the baker also brought two
boxes of 12 apples before noon. That makes 27 + 24 = 51. In the afternoon a third of them was sold:
51 / 3 = 17, so 51 - 17 = 34. Let me check the sum again: 48 - 7 - 14 + 24 - 17 = 34. The answer
is 34.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else None

The harbour lay quiet when Marta came down the hill. She had walked since dawn, and her shoes were
white with dust. "Is the boat still here?" she asked the old man who mended nets beside the wall. He
did not look up. "It left at six," he said. "There will be another one tomorrow, if the wind turns."
She sat down on a coil of rope and counted her money. It was enough for the passage, but not for a
room. Far out a sail caught the light, then it was gone.

Suppose that n is even. Then n = 2k for some whole number k, and n squared is 4 times k squared,
which is even as well. Now suppose that n is odd, so that n = 2k + 1. Then n squared is
4k(k + 1) + 1, which leaves the remainder 1 when it is divided by 8, since k(k + 1) is even. So a
square never leaves the remainder 2 or 3 when it is divided by 4. Therefore 1,000,003 is no square.

Dear Ms Okafor, thank you for your order of 3 March. Two of the five lamps are in stock and will be
sent today. The other three come from Lisbon and take about ten days. If you prefer one delivery,
please tell us until Friday. The invoice (no. 20417, 318.50 euros) is attached. Kind regards.

{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3, "units": "metric"}}

Photosynthesis turns light into chemical energy. In the leaves of a plant, chlorophyll takes up red
and blue light; green light is reflected, which is why leaves look green. Water is split, oxygen is
released, and carbon dioxide from the air becomes sugar.
"""
