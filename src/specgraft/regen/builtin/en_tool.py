"""English tool families: requests that need one of the offered functions."""

from __future__ import annotations

from . import tools as t
from .en_words import CITIES, NAMES, TOPICS, words
from .family import Family, fill_in

_SYSTEM = words(
    "You are an assistant with access to functions. Use them when they help.|You are a helpful "
    "assistant. Call a function if you need data you do not have."
    "|Use the tools. Ask back if something is missing."
)
_DAYS = words("today|tomorrow|on Friday|next Monday|this weekend|on Wednesday|on Sunday|the day after tomorrow")
_CLOCK = words("9 am|10:30|noon|2 pm|3:15 pm|5 pm|half past six|8 in the evening")
_MEETINGS = words(
    "dentist appointment|lunch with {name}|budget meeting|piano lesson|call with {name}|"
    "parent-teacher talk|yoga class|job interview|team breakfast|haircut|car inspection"
    "|birthday dinner for {name}|project review|vet visit|chess club|rehearsal|coffee with {name}|"
    "visit to the bank|workshop on safety|football training"
)
_MONEY = words("EUR|USD|GBP|JPY|KRW|CHF|CAD|AUD|SEK|INR|BRL|MXN")
_COMPANIES = words(
    "a car maker called Voltera|Northwind Traders|Acme Robotics|Blue Harbor Shipping|Sunpeak Energy|"
    "Fernhill Foods|Kestrel Air|Lumen Optics|Granite Bank|Willow Games|Ostara Health|Delta Mills"
)
_NOTES = words(
    "buy milk|water the plants|call the plumber|send the invoice|take the bread out of the oven|"
    "renew my passport|pick up the kids|pay the rent|return the library books"
    "|charge the camera|book the ferry|take my medicine|feed the neighbour's cat|change the sheets|"
    "back up my laptop|prepare the slides|wish {name} a happy birthday|hand in the essay"
)
_WHEN = words(
    "at 6 pm|tomorrow morning|in two hours|on Saturday|when I get home|every Monday|in twenty "
    "minutes|on the first of the month|before lunch|tonight"
)
_PLACES = words(
    "pharmacy|coffee shop|bakery|bike repair shop|playground|cash machine|vegan restaurant|hardware "
    "store|swimming pool|bookshop|petrol station|post office|museum|park|laundrette|dentist|"
    "supermarket|cinema"
)
_SPOTS = words(
    "the main station|the cathedral|my hotel in {city}|the airport of {city}|the old town of {city}|"
    "the harbour|the university of {city}|the football stadium|the city hall of {city}|Market Street|"
    "the zoo|the opera"
)
_ROOMS = words(
    "living room|bedroom|kitchen|bathroom|hallway|office|nursery|garage|dining room|guest room|basement|workshop"
)
_SONGS = words(
    "some relaxing piano music|jazz from the fifties|a song for running|Vivaldi's Four Seasons|whale "
    "sounds|something cheerful|an acoustic playlist|drum and bass|songs for a dinner party|lullabies|"
    "Brazilian guitar|film music|rain sounds|a waltz"
)
_REASONS = words(
    "the zip is broken|it arrived too late|the colour is wrong|I ordered it twice|it is too small|"
    "the screen has a crack|parts are missing|I changed my mind|it smells odd|it does not switch on"
)
_PRODUCTS = words(
    "jacket|blender|lamp|headphones|backpack|tent|keyboard|shoes|rug|kettle|tripod|bookshelf|monitor|"
    "curtains|drill|raincoat"
)
_FOOD = words(
    "tomatoes|rice|eggs|spinach|chickpeas|potatoes|mushrooms|salmon|tofu|carrots|noodles|chicken|"
    "beans|peppers|cheese|leeks|pumpkin|lentils|coconut milk|aubergines"
)
_DIET = words("vegetarian|vegan|quick|spicy|cheap|gluten-free|festive|light")
_GENRES = words(
    "science fiction|romantic comedy|western|documentary|thriller|animation|crime|musical|war drama|"
    "fantasy|horror|silent film"
)
_RESTAURANTS = words(
    "Casa Verde|The Blue Door|Ristorante Nino|Lotus Garden|The Rusty Spoon|Chez Margot|Sakura House|"
    "The Old Mill|Taverna Ilios|Spice Route|Harbour Grill|Café Linden"
)
_REPORTS = words(
    "customers who ordered more than five times|the ten best-selling products|revenue per month|"
    "orders that were never paid|employees hired this year|the average basket size|products with no "
    "stock"
    "|cities with the most returns|open support tickets by age|suppliers without a contract|the "
    "slowest deliveries|new accounts per week|unused discount codes|the share of repeat buyers"
)
_PATHS = words(
    "notes/todo.txt|reports/2023/summary.md|src/main.py|config.yaml|data/sales.csv|logs/server.log|"
    "README.md|letters/draft.txt|recipes/bread.txt|docs/api.md|tests/results.json|"
    "contracts/lease.txt|src/app.js|budget/may.csv"
)
_WORK = words(
    "Tell me what it says|Summarise it|Is there a deadline in it|Count the lines|Look for errors|"
    "What is the title|Who wrote it|Explain it to me|Find the total|List the open points"
)
_STATIONS = words(
    "Central Station|Airport|North Gate|University|Old Harbour|Riverside|Market Square|Kings Park|"
    "Stadium|Westfield|Museum Island|Mill Lane"
)
_SPORTS = words(
    "a run|a swim|a bike ride|a yoga session|weight training|a hike|a rowing session|a tennis match|"
    "a dance class|a climb|a football game|a brisk walk"
)
_RARE = words(
    "petrichor|quixotic|defenestration|sonder|mellifluous|borborygmus|halcyon|susurrus|limerence|"
    "apricity|verisimilitude|perspicacious|obstreperous|lugubrious|zeitgeist|schadenfreude|ennui|"
    "hygge|saudade|wanderlust|penultimate|ersatz"
)
_PHRASES = words(
    "Where is the nearest pharmacy?|I would like a window seat.|My luggage did not arrive.|Is "
    "breakfast included?|Could you speak more slowly?|I am allergic to peanuts.|Happy birthday!|What "
    "time does it close?"
    "|The bill, please.|I have a reservation.|Can I pay by card?|We are lost.|It was nice to meet "
    "you.|Please call a doctor.|How much is this?|See you tomorrow."
)
_TONGUES = words("French|Korean|Japanese|Spanish|German|Italian|Arabic|Turkish|Portuguese|Polish|Greek|Hindi")


FAMILIES = (
    Family(
        "weather",
        (
            "What's the weather like in {city} {day}?",
            "Do I need an umbrella in {city} {day}?",
            "How warm will it get in {city} {day}? In {unit}, please.",
            "I'm flying to {city} {day}. What should I wear?",
            "Is {city} warmer than {other} today?",
            "Can we have a picnic in {city} {day}?",
        ),
        {"city": CITIES, "other": CITIES[::-1], "day": _DAYS, "unit": ["Celsius", "Fahrenheit"]},
        _SYSTEM,
        0.3,
        [t.WEATHER, t.AIR],
        170,
        lambda v: {} if v["city"] != v["other"] else None,
    ),
    Family(
        "calendar",
        (
            "Put a {what} in my calendar {day} at {time}.",
            "Schedule a {what} {day} at {time} for {k} minutes.",
            "Do I have anything {day}? If not, add a {what} at {time}.",
            "Move things around if needed, but I must have a {what} {day} at {time}.",
            "What is on my calendar {day}?",
        ),
        {"what": _MEETINGS, "name": NAMES, "day": _DAYS, "time": _CLOCK, "k": [15, 30, 45, 60, 90]},
        _SYSTEM,
        0.3,
        [t.EVENT, t.EVENTS],
        160,
        fill_in("what"),
    ),
    Family(
        "search-web",
        (
            "Search the web for {topic}.",
            "Find {n} recent articles about {topic}.",
            "Look up {topic} and give me a short overview.",
            "What are people writing about {topic} at the moment?",
            "Find a good beginner's page on {topic}.",
        ),
        {"topic": TOPICS, "n": ["three", "five", "ten"]},
        _SYSTEM,
        0.3,
        [t.SEARCH],
        160,
    ),
    Family(
        "currency",
        (
            "How much is {a} {x} in {y}?",
            "Convert {a} {x} to {y}.",
            "I have {a} {x} left from my trip to {city}. What do I get in {y}?",
            "A hotel in {city} costs {a} {x} per night. What is that in {y} for {n} nights?",
            "Which is worth more, {a} {x} or {a} {y}?",
        ),
        {
            "a": [15, 40, 75, 120, 260, 499, 850, 1200, 3500, 20000],
            "x": _MONEY,
            "y": _MONEY[::-1],
            "city": CITIES,
            "n": [2, 3, 4, 6],
        },
        _SYSTEM,
        0.3,
        [t.CURRENCY, t.CALCULATE],
        150,
        lambda v: {} if v["x"] != v["y"] else None,
    ),
    Family(
        "shares",
        (
            "What is the share price of {c}?",
            "Compare the shares of {c} and {d}.",
            "I own {k} shares of {c}. What are they worth?",
            "Tell me when it makes sense to look at {c} again. What does it cost now?",
            "Any news about {c}? And the current price, please.",
        ),
        {"c": _COMPANIES, "d": _COMPANIES[::-1], "k": [5, 12, 40, 75, 150, 300]},
        _SYSTEM,
        0.3,
        [t.STOCK, t.NEWS],
        120,
        lambda v: {} if v["c"] != v["d"] else None,
    ),
    Family(
        "send-mail",
        (
            "Email {name} that I can't come to the {what}.",
            "Write to {name}: the {what} is moved to {time}. Send it.",
            "Send {name} a text saying I'm {k} minutes late.",
            "Ask {name} by email whether {time} works for the {what}.",
            "Text {name}: don't forget to {note}.",
        ),
        {
            "name": NAMES,
            "what": [m for m in _MEETINGS if "{name}" not in m],
            "time": _CLOCK,
            "k": [5, 10, 20, 30, 45],
            "note": [n for n in _NOTES if "{name}" not in n],
        },
        _SYSTEM,
        0.3,
        [t.EMAIL, t.MESSAGE],
        140,
    ),
    Family(
        "reminders",
        (
            "Remind me to {note} {when}.",
            "Set a timer for {k} minutes so that I don't forget to {note}.",
            "I have to {note} {when}. Can you remind me?",
            "Add '{note}' to my to-do list.",
            "Don't let me forget to {note} {when}, please.",
        ),
        {"note": _NOTES, "when": _WHEN, "k": [5, 8, 12, 25, 40, 90], "name": NAMES},
        _SYSTEM,
        0.3,
        [t.REMINDER, t.TIMER, t.TODO],
        150,
        fill_in("note"),
    ),
    Family(
        "flights",
        (
            "Find a flight from {city} to {other} {day}.",
            "I want to fly from {city} to {other} {day}, business class.",
            "What's the cheapest way to fly from {city} to {other} {day}?",
            "Book me something from {city} to {other} {day}; I prefer the morning.",
            "Are there direct flights between {city} and {other} {day}?",
        ),
        {"city": CITIES, "other": CITIES[::-1], "day": _DAYS},
        _SYSTEM,
        0.3,
        [t.FLIGHTS],
        130,
        lambda v: {} if v["city"] != v["other"] else None,
    ),
    Family(
        "hotels",
        (
            "Find a hotel in {city} for {k} nights.",
            "We are {g} people and need {k} nights in {city} for less than {p} euros a night.",
            "Is there a quiet hotel in {city}? {k} nights from {day}.",
            "Hotel in {city}, {k} nights, at most {p} per night.",
            "I need a place to stay in {city} {day}. {g} guests, {k} nights.",
        ),
        {
            "city": CITIES,
            "k": [1, 2, 3, 4, 5, 7],
            "g": [2, 3, 4, 5],
            "p": [60, 80, 110, 150, 220],
            "day": ["Friday", "tomorrow", "Monday", "next Sunday", "the tenth"],
        },
        _SYSTEM,
        0.3,
        [t.HOTELS, t.WEATHER],
        130,
    ),
    Family(
        "directions",
        (
            "How do I get from {a} to {b}?",
            "How long is the walk from {a} to {b}?",
            "Give me a bike route from {a} to {b}.",
            "Is it faster by car or by bus from {a} to {b}?",
            "I'm at {a} and have to be at {b} by {time}. When should I leave?",
        ),
        {"a": _SPOTS, "b": _SPOTS[::-1], "city": CITIES, "time": _CLOCK},
        _SYSTEM,
        0.3,
        [t.ROUTE],
        140,
        lambda v: fill_in("a", "b")(v) if v["a"] != v["b"] else None,
    ),
    Family(
        "nearby",
        (
            "Find a {kind} near {a}.",
            "Is there a {kind} open now near {a}?",
            "Where is the closest {kind} to {a}?",
            "I'm at {a} and need a {kind}.",
            "List a few options: {kind}, close to {a}, good reviews.",
        ),
        {"kind": _PLACES, "a": _SPOTS, "city": CITIES},
        _SYSTEM,
        0.3,
        [t.PLACES, t.ROUTE],
        140,
        fill_in("a"),
    ),
    Family(
        "smart-home",
        (
            "Turn on the light in the {room}.",
            "Make it {c} degrees in the {room}.",
            "Dim the {room} lights to {p} percent and play {song}.",
            "I'm leaving. Switch everything off in the {room}.",
            "Play {song} in the {room}.",
            "It's too cold in the {room}. Can you do something?",
            "Movie night in the {room}: lights at {p} percent, {c} degrees.",
        ),
        {"room": _ROOMS, "c": [17, 18, 19.5, 20, 21, 22.5], "p": [10, 20, 30, 45, 60, 80], "song": _SONGS},
        _SYSTEM,
        0.3,
        [t.LIGHT, t.HEATING, t.MUSIC],
        150,
    ),
    Family(
        "orders",
        (
            "Where is my order {o}?",
            "I want to return the {p} from order {o}: {why}.",
            "Order {o} was supposed to be here {day}. What happened?",
            "Please refund order {o}. {why:A}.",
            "Has the {p} in order {o} been shipped?",
            "My order number is {o}. I'm waiting for the {p}.",
        ),
        {
            "o": [
                "A-10482",
                "77-3120",
                "KX5521",
                "2024-0917",
                "B88201",
                "Q-5530-12",
                "904417",
                "ZT-0081",
                "55-19-02",
                "M30977",
            ],
            "p": _PRODUCTS,
            "why": _REASONS,
            "day": ["yesterday", "on Tuesday", "last week", "two days ago"],
        },
        ["You are the support assistant of an online shop.", *_SYSTEM],
        0.4,
        [t.ORDER, t.REFUND],
        150,
    ),
    Family(
        "cooking",
        (
            "I have {a} and {b}. What can I cook?",
            "Find a {diet} recipe with {a}.",
            "Something {diet} with {a} and {b} in under {m} minutes?",
            "What can I make from {a}, {b} and {c}?",
            "We're out of {a}. Find a {diet} dish with {b} instead.",
        ),
        {"a": _FOOD, "b": _FOOD[::-1], "c": _FOOD[5:] + _FOOD[:5], "diet": _DIET, "m": [15, 20, 30, 45]},
        _SYSTEM,
        0.3,
        [t.RECIPES],
        140,
        lambda v: {} if len({v["a"], v["b"], v["c"]}) == 3 else None,
    ),
    Family(
        "library-search",
        (
            "Does the library have a book about {topic}?",
            "Find books on {topic} that I can borrow today.",
            "I need a children's book about {topic}.",
            "Which books about {topic} are available? Also set a reminder to pick one up {when}.",
        ),
        {"topic": TOPICS, "when": _WHEN[1:5]},
        _SYSTEM,
        0.3,
        [t.BOOKS, t.REMINDER],
        120,
    ),
    Family(
        "movies",
        (
            "Find {genre:an} from {year}.",
            "I'm in the mood for {genre}. Any ideas?",
            "Recommend {genre:an} for {k} people who disagree about everything.",
            "Which {genre} came out in {year}? Set a reminder to watch it {when}.",
            "{genre:An} without violence, please, not older than {year}.",
        ),
        {
            "genre": [g if "film" in g else g + " film" for g in _GENRES],
            "year": range(1962, 2024, 3),
            "k": [2, 3, 4, 5],
            "when": _WHEN[:5],
        },
        _SYSTEM,
        0.3,
        [t.MOVIES, t.REMINDER],
        120,
    ),
    Family(
        "world-time",
        (
            "What time is it in {city}?",
            "What is the time difference between {city} and {other}?",
            "Can I still call {name} in {city}, or is it too late?",
            "If it is {time} here, what time is it in {city}?",
            "Schedule a call with {name} in {city} at {time} my time.",
        ),
        {"city": CITIES, "other": CITIES[::-1], "name": NAMES, "time": _CLOCK},
        _SYSTEM,
        0.3,
        [t.TIME, t.EVENT],
        120,
        lambda v: {} if v["city"] != v["other"] else None,
    ),
    Family(
        "reservation",
        (
            "Book a table for {k} at {r} {day} at {time}.",
            "I'd like to eat at {r} {day}. {k} people, {time}.",
            "Reserve {r} for {name}'s birthday, {k} people, {day} at {time}.",
            "Is {r} free {day} at {time}? If so, book for {k}.",
        ),
        {"r": _RESTAURANTS, "k": [2, 3, 4, 5, 6, 8], "day": _DAYS, "time": _CLOCK[2:], "name": NAMES},
        _SYSTEM,
        0.3,
        [t.TABLE, t.EVENT],
        120,
    ),
    Family(
        "database",
        (
            "Show me {report}.",
            "Query the database for {report}.",
            "I need {report} for a meeting {day}.",
            "Get {report} and email the result to {name}.",
            "How would you find {report}? Run it.",
            "Compare {report} with last year.",
        ),
        {"report": _REPORTS, "day": _DAYS, "name": NAMES},
        [
            (
                "Tables: customers(id, name, city), orders(id, customer_id, total, paid, created_at), "
                "products(id, name, stock)."
            ),
            *_SYSTEM,
        ],
        0.5,
        [t.SQL, t.EMAIL],
        120,
    ),
    Family(
        "files",
        (
            "Open {path}. {work}.",
            "{work:A}: {path}",
            "Read {path} and {other}, and compare them.",
            "Is there a file called {path}? {work}.",
            "Which files are next to {path}?",
        ),
        {"path": _PATHS, "other": _PATHS[::-1], "work": _WORK},
        _SYSTEM,
        0.3,
        [t.READ_FILE, t.LIST_FILES],
        120,
        lambda v: {} if v["path"] != v["other"] else None,
    ),
    Family(
        "departures",
        (
            "When is the next train from {s}?",
            "I'm at {s} and want to go to {d}. What leaves next?",
            "Is the line from {s} to {d} on time?",
            "Next three departures from {s}, please.",
            "I have to be at {d} by {time}. Which train from {s} should I take?",
        ),
        {"s": _STATIONS, "d": _STATIONS[::-1], "time": _CLOCK},
        _SYSTEM,
        0.3,
        [t.TRAIN, t.ROUTE],
        110,
        lambda v: {} if v["s"] != v["d"] else None,
    ),
    Family(
        "training-log",
        (
            "Log {sport} of {m} minutes.",
            "I just finished {sport}: {m} minutes, {km} km.",
            "Add {sport} to my diary for {m} minutes and start a {k}-minute timer for stretching.",
            "Yesterday I did {sport} for {m} minutes with {name}. Please save it.",
        ),
        {"sport": _SPORTS, "m": [20, 25, 35, 45, 60, 75], "km": [2, 3.5, 5, 8, 12], "k": [5, 10, 15], "name": NAMES},
        _SYSTEM,
        0.3,
        [t.WORKOUT, t.TIMER],
        110,
    ),
    Family(
        "dictionary",
        (
            "Look up the word '{w}'.",
            "What does '{w}' mean, and how do you say it in {l}?",
            "Is '{w}' a real word? Check the dictionary.",
            "Define '{w}' and use it in a sentence.",
        ),
        {"w": _RARE, "l": _TONGUES},
        _SYSTEM,
        0.3,
        [t.DICTIONARY, t.TRANSLATE],
        100,
    ),
    Family(
        "phrasebook",
        (
            "Translate '{p}' into {l}.",
            "How do I say '{p}' in {l}?",
            "I'm in {city} and need this in {l}: {p}",
            "Send {name} this text in {l}: {p}",
        ),
        {"p": _PHRASES, "l": _TONGUES, "city": CITIES, "name": NAMES},
        _SYSTEM,
        0.3,
        [t.TRANSLATE, t.MESSAGE],
        120,
    ),
    Family(
        "no-tool-needed",
        (
            "Thanks, that was all for {day}!",
            "Who are you, and what can you do for me {day}?",
            "Tell me a joke about {topic}.",
            "Explain {topic} in one sentence.",
            "Write a two-line poem for {name}.",
        ),
        {"day": _DAYS, "topic": TOPICS, "name": NAMES},
        _SYSTEM,
        0.4,
        [t.WEATHER, t.SEARCH, t.CURRENCY],
        110,
    ),
)
