"""English chat families: writing tasks."""

from __future__ import annotations

from .en_words import CITIES, NAMES, SYSTEM, words
from .family import Family

_HEROES = words(
    "a shy dragon|a retired clockmaker|a lonely robot|two sisters|a night-shift nurse|a boy with a "
    "paper boat|a lighthouse keeper"
    "|an old violin|a stray dog|a young inventor|a ghost who hates the dark|a taxi driver|a gardener|"
    "an orphaned fox|a tired superhero"
    "|a bus full of strangers|a librarian|a fisherman's daughter|a forgetful king|a snowman|a street "
    "painter|a beekeeper"
)
_EVENTS = words(
    "finds a hidden door|loses something precious|gets an unexpected letter|has to keep a secret|"
    "meets a rival|learns to forgive"
    "|makes a promise|travels by train for the first time|discovers an old map|must cross a frozen "
    "lake|hears a strange song"
    "|saves a festival|wakes up in the wrong town|tells a lie that grows|plants a magic seed|waits "
    "for the last bus"
    "|repairs a broken radio|wins a prize by mistake|has one hour left|finds a message in a bottle"
)
_POEM = words(
    "autumn rain|the first snow|a cup of tea|an empty train station|my old bicycle|city lights|the "
    "sea at night|a sleeping cat"
    "|Monday morning|a lost sock|the last day of summer|my grandmother's kitchen|a broken umbrella|"
    "spring in the park|the stars"
    "|homework|a busy market|silence|a long road trip|a garden at dawn|the smell of bread|friendship|"
    "fog|an old photograph"
)
_FORMS = words("haiku|limerick|short poem|four-line rhyme|free-verse poem|funny poem|sonnet|lullaby")
_ASKS = words(
    "ask my landlord to repair the heating|ask my boss for a day off on Friday|thank a colleague for "
    "covering my shift"
    "|cancel my gym membership|invite my neighbours to a barbecue|apologise to a customer for a late "
    "delivery"
    "|ask a professor for a deadline extension|follow up after a job interview|tell my team that the "
    "meeting is moved"
    "|complain about a noisy hotel room|ask a shop about a missing parcel|decline a wedding "
    "invitation politely"
    "|request a refund for a broken kettle|introduce myself to new teammates|remind a client about "
    "an unpaid invoice"
    "|ask a friend to look after my cat|announce that the office is closed on Monday|ask for a "
    "letter of recommendation"
    "|congratulate a cousin on her graduation|ask the city council to fix a street lamp|resign from "
    "my part-time job"
    "|book a table for twelve people|offer to help at the school fair|ask a supplier for a price list"
    "|report a lost wallet to the train company|suggest a new coffee machine for the office"
)
_TONES = words("polite|friendly|formal|short and direct|warm|apologetic but firm|light-hearted|professional")
_PRODUCTS = words(
    "a reusable water bottle|a wooden desk lamp|noise-cancelling headphones|a folding bicycle|"
    "homemade jam|a plant subscription"
    "|a travel pillow|a children's raincoat|a language app|a second-hand bookshop|a family bakery|"
    "handmade candles|a dog-walking service"
    "|an electric kettle|a yoga studio|a fountain pen|a backpack for students|a board game about "
    "trains|organic soap|a city bike tour"
    "|a pottery class|a cookbook for students|a solar phone charger|a weekend hiking club"
)
_PLACES = words(
    "a crowded market|an abandoned factory|a quiet library|a mountain hut in winter|a harbour at "
    "sunrise|a school corridor after the bell"
    "|a tiny bookshop|a jungle after rain|a hospital waiting room|a night train|a rooftop garden|an "
    "old theatre|a desert road"
    "|a fairground at closing time|a busy kitchen|a frozen river|a deserted beach|an attic full of "
    "toys|a bakery before dawn"
    "|a spaceship's control room|a farmhouse in a storm|an underground station|a flower shop|a "
    "village square on market day"
)
_DEBATE = words(
    "school uniforms|homework in primary school|a four-day working week|free public transport|zoos|"
    "banning cars from city centres"
    "|remote work|tipping in restaurants|mobile phones in class|daylight saving time|a sugar tax|"
    "fast fashion|nuclear power"
    "|keeping exotic pets|paying athletes millions|space tourism|electronic voting|plastic bags|"
    "single-sex schools|video games as sport"
    "|later school start times|a universal basic income|cash-free shops|compulsory voting|lab-grown "
    "meat"
)
_OCCASIONS = words(
    "a friend's 30th birthday|my parents' anniversary|a colleague's retirement|a graduation|a new "
    "baby|a housewarming party"
    "|a teacher on the last day of school|a neighbour who is moving away|a teammate who broke her "
    "leg|a wedding|a farewell lunch"
    "|a nephew's first day at school|a coach after a lost final|a nurse who took care of me|my "
    "sister's driving test|New Year"
)
_TALKERS = words(
    "a cat and a vacuum cleaner|the Sun and the Moon|a customer and a very honest waiter|two rival "
    "bakers|a teacher and a late student"
    "|a robot and its inventor|a tourist and a local farmer|an optimist and a pessimist|a spider and "
    "a fly|two stars in the sky"
    "|a detective and a nervous witness|a doctor and a patient who fears needles|a pen and a "
    "keyboard|a child and a snowman"
    "|a taxi driver and a lost musician|two strangers on a delayed train|a dragon and a knight who "
    "hates fighting|a landlord and a ghost"
)
_MATTERS = words(
    "the weather|breakfast|who is more useful|a missing key|holidays|fear|an old song|time|a broken "
    "promise|the best sandwich"
    "|dreams|what to do on Sunday|luck|a strange noise|money|the first day of spring"
)
_INTERESTS = words(
    "museums|street food|hiking|live music|history|architecture|beaches|vintage shops|parks and "
    "gardens|nightlife|photography|local crafts"
)

FAMILIES = (
    Family(
        "story",
        (
            "Write a short story about {hero} who {event}.",
            "Tell me a bedtime story: {hero} {event}.",
            "Write the opening paragraph of a novel in which {hero} {event}.",
            "Write a story in exactly five sentences about {hero} who {event}.",
            "Write a {mood} story about {hero} in {place}.",
            "Give me three ideas for a story about {hero} who {event}.",
        ),
        {
            "hero": [h for h in _HEROES if h != "two sisters"],
            "event": _EVENTS,
            "place": _PLACES,
            "mood": ["funny", "sad", "mysterious", "hopeful", "scary", "calm"],
        },
        SYSTEM,
        0.1,
        limit=480,
    ),
    Family(
        "poem",
        (
            "Write a {form} about {thing}.",
            "Write me a {form} about {thing} that makes people smile.",
            "I need a {form} about {thing} for a greeting card.",
            "Write two lines about {thing} that rhyme, then explain your choice of words.",
        ),
        {"form": _FORMS, "thing": _POEM},
    ),
    Family(
        "email",
        (
            "Write {tone:an} email to {ask}.",
            "Help me {ask}. Write the email for me.",
            "Draft {tone:an} message to {ask}. Sign it as {name}.",
            "Write a text message of at most two sentences to {ask}.",
            "I need to {ask}. What should the subject line and the first sentence be?",
        ),
        {"ask": _ASKS, "tone": _TONES, "name": NAMES},
        SYSTEM,
        0.2,
        limit=320,
    ),
    Family(
        "advert",
        (
            "Write a product description for {thing}.",
            "Write a {tone} advertisement for {thing}.",
            "Come up with {n} slogans for {thing}.",
            "Write a social media post that introduces {thing}.",
            "Write a customer review of {thing}. Give it {stars} stars.",
        ),
        {
            "thing": _PRODUCTS,
            "tone": ["playful", "short", "serious", "luxurious", "honest"],
            "n": ["three", "five", "ten"],
            "stars": ["two", "three", "four", "five"],
        },
    ),
    Family(
        "describe-scene",
        (
            "Describe {place} using all five senses.",
            "Describe {place} in three sentences, without using the word 'is'.",
            "Write a paragraph set in {place}. The narrator is {mood}.",
            "Describe {place} from the point of view of {eye}.",
        ),
        {
            "place": _PLACES,
            "mood": ["in a hurry", "bored", "homesick", "overjoyed", "afraid", "curious", "very old"],
            "eye": ["a child", "a bird", "a thief", "a tourist", "a mouse", "an architect", "someone in love"],
        },
    ),
    Family(
        "debate",
        (
            "What are the pros and cons of {issue}?",
            "Write a short argument in favour of {issue}.",
            "Write a short argument against {issue}.",
            "Give me {n} arguments for and against {issue}.",
            "How would {who} see the question of {issue}?",
            "I have to give a two-minute speech about {issue}. Write an outline.",
        ),
        {
            "issue": _DEBATE,
            "n": ["two", "three", "four"],
            "who": ["a parent", "an economist", "a student", "a mayor", "a doctor", "a retired teacher"],
        },
        SYSTEM,
        0.15,
    ),
    Family(
        "card",
        (
            "Write a card for {occasion}.",
            "Write {tone:an} greeting for {occasion}, at most 40 words.",
            "I don't know what to write for {occasion}. Give me three options.",
            "Write a short speech for {occasion}. Mention {name} and {detail}.",
        ),
        {
            "occasion": _OCCASIONS,
            "tone": ["heartfelt", "funny", "simple", "rhyming", "old-fashioned"],
            "name": NAMES,
            "detail": words(
                "a burnt cake|a trip to the lake|years of hard work|a terrible pun|the green bicycle|early "
                "mornings|a lost suitcase"
            ),
        },
    ),
    Family(
        "dialogue",
        (
            "Write a dialogue between {pair} about {matter}.",
            "Write a funny conversation between {pair}. They talk about {matter}.",
            "Write a short scene: {pair} disagree about {matter}.",
        ),
        {"pair": _TALKERS, "matter": _MATTERS},
    ),
    Family(
        "trip",
        (
            "Plan {span} in {city} for someone who loves {interest}.",
            "What can I do in {city} in {span}?",
            "I am visiting {city} with {who}. What do you recommend?",
            "Write a postcard from {city} to {name}.",
            ("Which is the better choice for a holiday focused on {interest}: {city} or the countryside around it?"),
            "Make a packing list for {span} in {city} in {season}.",
        ),
        {
            "city": CITIES,
            "span": ["a weekend", "one day", "three days", "a week"],
            "interest": _INTERESTS,
            "name": NAMES,
            "who": [
                "two small children",
                "my parents",
                "a friend who uses a wheelchair",
                "a large group",
                "my dog",
                "colleagues",
            ],
            "season": ["spring", "summer", "autumn", "winter"],
        },
        SYSTEM,
        0.15,
    ),
)
