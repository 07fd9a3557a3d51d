"""The text the tiny models' tokenizer is trained on; benches read it as a prompt, too."""

TINY_TEXT = """\
A caravanserai is where long journeys rest. The walls are thick and the gate is low, so that nobody rides in. In the
middle of the yard there is a well, and around the yard there are rooms for the travellers and stables for the animals.
In the evening the travellers unload what they have brought, they water the camels, and they tell each other what the
road ahead is like. In the morning each caravan goes on exactly as it came: the same animals, the same loads, the same
way to go. What was left in the room is left to the next one who sleeps there.

The keeper of the house writes everything down in a book. He writes who came and when, how many animals there were,
what they carried and where they were going. When two caravans part at the well he turns the page and writes both of
their names at the top. "The road behind them is the same road," he says, "so I write it once. Only what comes after
the well is different." When a traveller returns after a year, the keeper opens the book and reads to him what he was
about to do. The traveller then does it, as if he had never been away.

One day a merchant asked the keeper: "What would happen if the book were lost?" The keeper thought about it for a while
and answered: "Then we would walk the road again from the beginning, and we would write down the same things, because
the road does not change. It would cost us time. It would not cost us anything else." The merchant asked him further:
"And if only one page were torn?" "Then we would see that it is torn, because I count the letters on every page, and we
would not read from it. We would go back to the last whole page and walk from there."

There are three kinds of rooms. The first is near the fire, it is warm, and it costs the most. The second is above the
stables, where it is cold but dry. The third is a cellar in the rock, where nobody can live but where a sealed chest
will keep for a hundred years. A good keeper knows who will need the fire tonight, who can wait above the stables, and
whose chest can go down into the cellar until he comes back. He never moves a man who is eating.

for night in range(1, 4):
    for guest in house.guests:
        if guest.is_waiting and not guest.is_eating:
            house.move(guest, to="cellar", because="the fire is needed")
        print(f"{night}: {guest.name} has {len(guest.loads)} loads")

Numbers: 0 1 2 3 4 5 6 7 8 9 10 12 16 24 32 48 64 96 100 128 256 512 1000 1024 2048 4096. It's 12:30, isn't it? They've
said we'll see; I'm sure you're right. Über den Weg, café, naïve, señor. Путь и привал. 客栈 路 世界. 🐪🐪 🏜
"""
