"""English chat families."""

from __future__ import annotations

from . import en_chat_text, en_chat_write
from .en_words import AUDIENCES, SYSTEM, TOPICS, words
from .family import Family

_SKILLS = words(
    "learn to touch-type|start running|learn the guitar|read more books|learn Spanish|cook at home "
    "more often|sleep better"
    "|stop procrastinating|save money each month|keep houseplants alive|improve my handwriting|wake "
    "up earlier|drink more water"
    "|spend less time on my phone|start journaling|meditate daily|learn to swim as an adult|get "
    "better at chess|learn to draw"
    "|prepare for a half marathon|remember people's names|speak more confidently in meetings|tidy my "
    "flat|bake bread"
    "|grow tomatoes on a balcony|learn to knit|study for a biology exam|write a novel|start cycling "
    "to work|take better photos"
)
_PROBLEMS = words(
    "my flatmate never washes the dishes|my best friend cancelled on me again|I feel nervous before "
    "every exam"
    "|my dog barks whenever I leave|I keep arguing with my sister about money|I don't enjoy my job "
    "any more"
    "|my neighbour plays loud music at night|I can't focus when I study|my child refuses to eat "
    "vegetables"
    "|I have two job offers and cannot decide|my laptop gets very hot|I always run out of money "
    "before payday"
    "|my team ignores my ideas in meetings|I moved to a new city and know nobody|I forgot my "
    "friend's birthday"
    "|my manager gives me too much work|I'm scared of flying and have a trip next week|my cat "
    "scratches the sofa"
    "|I get headaches after long days at the screen|my teenager spends all night gaming|I said "
    "something rude to a friend"
    "|my basil plant keeps dying|I wake up at four every morning|I feel shy when speaking a foreign "
    "language"
    "|my colleague takes credit for my work|I have to give a speech at a wedding|I burn rice every "
    "time I cook it"
)
_PAIRS = words(
    "tea and coffee|cats and dogs|renting and buying a home|a laptop and a tablet|city life and "
    "country life|rice and pasta"
    "|public transport and driving|novels and films|online classes and classroom teaching|gas and "
    "induction cooking"
    "|electric cars and petrol cars|jogging and swimming|paper books and e-books|butter and olive "
    "oil|mountains and the beach"
    "|a bicycle and an electric scooter|Mars and Venus|viruses and bacteria|alligators and "
    "crocodiles|weather and climate"
    "|a credit card and a debit card|saving and investing|empathy and sympathy|frogs and toads|a "
    "comet and an asteroid"
    "|jazz and blues|baking soda and baking powder|Java and JavaScript|RAM and storage|HTTP and "
    "HTTPS|a virus and a worm"
    "|Baroque and Rococo|football and rugby|freelancing and employment|yoga and Pilates|wool and "
    "cotton|LED and halogen lamps"
    "|speed and velocity|mass and weight|fission and fusion|stalactites and stalagmites|a simile and "
    "a metaphor"
)
_LISTED = words(
    "healthy breakfasts|icebreaker questions for a team meeting|indoor activities for a rainy day|"
    "uses for stale bread"
    "|gift ideas for a retired teacher|books about friendship|animals that live in the desert|names "
    "for a bakery"
    "|ways to reuse glass jars|cheap hobbies|questions to ask at a job interview|vegetarian dinners|"
    "strange facts about octopuses"
    "|stretches for office workers|games to play on a long car trip|signs that a used car is a bad "
    "buy|famous women scientists"
    "|ways to save electricity at home|picnic snacks|rhyming words for 'light'|synonyms for 'happy'|"
    "countries without a coast"
    "|instruments in a symphony orchestra|things to pack for a camping trip|plants that need little "
    "light|jobs that involve travel"
    "|habits of good listeners|tourist mistakes to avoid in Italy|names for a black cat|science fair "
    "projects|kitchen tools for beginners"
    "|tips for a first date|reasons to learn history|one-pot meals|topics for a school debate|rules "
    "for a shared kitchen"
    "|ways to say no politely|slogans for a bicycle shop|trees with edible fruit|renewable energy "
    "sources|ways to calm down quickly"
)
_ROLES = words(
    "a pirate captain|a medieval blacksmith|a museum guide|a detective in the 1920s|a grumpy wizard|"
    "an astronaut on the Moon"
    "|a French chef|a job interviewer|a travel agent|a wise old tree|a time traveller from 2200|a "
    "sports commentator"
    "|a librarian|a ship's cook|a news anchor|a talking cat|an ancient Roman senator|a mountain "
    "guide|a barista|a robot butler"
)
_QUESTIONS = words(
    "What did you have for breakfast?|Why should I visit your home?|What is the hardest part of your "
    "day?|What are you afraid of?"
    "|Can you teach me something useful?|Tell me about your best friend.|What would you do with a "
    "million coins?"
    "|How do you stay warm in winter?|What is your opinion on modern music?|Give me directions to "
    "the nearest market."
    "|What is your greatest success?|I am lost. Can you help me?|What makes you laugh?|What should I "
    "cook tonight?"
)
_WORDS = words(
    "serendipity|ephemeral|resilient|ambiguous|nostalgia|pragmatic|ubiquitous|candid|meticulous|"
    "irony|paradox|frugal|eloquent"
    "|benevolent|tedious|whimsical|inevitable|reluctant|obsolete|vivid|plausible|diligent|arbitrary|"
    "subtle|novice|lucid|mundane"
    "|conscience|hypothesis|sovereign|stoic|zeal|gullible|trivial|thrive|mitigate|scrutiny|solace|"
    "tangible|vague"
)
_CAPITALS = words(
    "Australia|Canada|Brazil|Kenya|Norway|Vietnam|Turkey|Morocco|Chile|Poland|Thailand|Egypt|Iceland|"
    "Peru|New Zealand|Portugal"
    "|Mongolia|Finland|Ghana|Nepal|Switzerland|Cuba|Jordan|Ireland|Greece|Colombia|Malaysia|Ethiopia|"
    "Hungary|Uruguay"
)
_DISHES = words(
    "tomato soup|banana bread|vegetable curry|pancakes|fried rice|lentil stew|potato salad|an "
    "omelette|guacamole|apple pie"
    "|chicken noodle soup|hummus|pizza dough|beef tacos|mushroom risotto|kimchi pancakes|miso soup|"
    "roast vegetables|scones"
    "|spaghetti carbonara|fish and chips|falafel|shakshuka|chili|garlic bread|oat cookies|fruit "
    "salad|pumpkin soup|paella"
)
_LIMITS = words(
    "I only have one pan|I have no oven|it has to be vegan|I have 20 minutes|I am cooking for six "
    "people|I am allergic to nuts"
    "|I am on a small budget|I don't like onions|I want leftovers for tomorrow|I have never cooked "
    "before"
)
_IF = words(
    "the Moon disappeared|everyone could read minds|humans needed no sleep|all cars were silent|"
    "money did not exist"
    "|plants could talk|the internet stopped for a week|people lived to 200|it never rained again|"
    "animals could vote"
    "|gravity were half as strong|every school were online|nobody could lie|oil ran out tomorrow|all "
    "maps were wrong"
    "|there were only one language|robots did all the housework|the day had 30 hours|bees went "
    "extinct|winter lasted all year"
)
_MYTHS = words(
    "goldfish have a three-second memory|we use only ten percent of our brain|lightning never "
    "strikes the same place twice"
    "|sugar makes children hyperactive|the Great Wall is visible from the Moon|bulls hate the colour "
    "red|bats are blind"
    "|cracking your knuckles causes arthritis|you must drink eight glasses of water a day|hair grows "
    "back thicker after shaving"
    "|reading in dim light ruins your eyes|cold weather gives you a cold|ostriches bury their heads "
    "in the sand"
    "|coffee stunts your growth|Napoleon was very short|chewing gum stays in your stomach for seven "
    "years"
    "|Einstein failed mathematics|camels store water in their humps|the tongue has separate taste "
    "zones|toads give you warts"
)

FAMILIES = (
    Family(
        "explain",
        (
            "Explain {topic} to {who}.",
            "Can you explain {topic} in simple terms?",
            "What should I know about {topic}?",
            "Give me a short introduction to {topic}.",
            "I have to talk about {topic} in class. Help me understand the basics.",
            "Explain {topic} to {who}, with one everyday example.",
        ),
        {"topic": TOPICS, "who": AUDIENCES},
        SYSTEM,
        0.25,
        limit=480,
    ),
    Family(
        "analogy",
        (
            "Give me an analogy for {topic}.",
            "What is a good metaphor for {topic}, and where does it break down?",
            "Explain {topic} with a comparison from the kitchen.",
            "Compare {topic} to something {who} would know.",
        ),
        {"topic": TOPICS, "who": AUDIENCES},
    ),
    Family(
        "quiz",
        (
            "Write {n} quiz questions about {topic}, with answers.",
            "Make a multiple-choice question about {topic} and mark the right answer.",
            "Test me on {topic}: ask me {n} questions, from easy to hard.",
            "Write a true-or-false quiz about {topic} with {n} statements.",
        ),
        {"topic": TOPICS, "n": ["three", "four", "five", "six"]},
        SYSTEM,
        0.15,
    ),
    Family(
        "follow-up",
        (
            (
                "Tell me about {topic}.",
                "Do you want the short version or the detailed one?",
                "The {length} one, please.",
            ),
            ("I want to learn about {topic}.", "Great choice! What do you already know about it?", "{level}"),
            ("Hi!", "Hello! How can I help you today?", "I need a few facts about {topic} for {who}."),
        ),
        {
            "topic": TOPICS,
            "length": ["short", "detailed"],
            "who": AUDIENCES,
            "level": [
                "Nothing at all. Start from zero.",
                "I have heard the name, that's all.",
                "A little. Where do people usually get it wrong?",
                "I read one article, but I forgot most of it.",
                "I know the basics. Tell me something surprising.",
            ],
        },
        SYSTEM,
        0.3,
    ),
    Family(
        "how-to-start",
        (
            "I want to {skill}. Where do I start?",
            "Make a {span} plan to help me {skill}.",
            "What mistakes do people make when they try to {skill}?",
            "Give me {n} tips to {skill}.",
            "I tried to {skill} last year but gave up after a week. What should I do differently?",
            "How can I {skill} with only fifteen minutes a day?",
        ),
        {"skill": _SKILLS, "span": ["one-week", "two-week", "30-day", "three-month"], "n": ["three", "five", "seven"]},
        SYSTEM,
        0.2,
    ),
    Family(
        "advice",
        (
            "{problem:A}. What can I do?",
            "I need some advice: {problem}.",
            "{problem:A}. How would you handle it?",
            "Give me three practical tips. My problem: {problem}.",
            "{problem:A}. Is that normal? What would help?",
            "Be honest with me: {problem}. What is the first thing I should change?",
            "{problem:A}. What should I say or do {when}?",
        ),
        {"problem": _PROBLEMS, "when": ["today", "this weekend", "first", "to fix this calmly"]},
        SYSTEM,
        0.25,
    ),
    Family(
        "compare",
        (
            "What is the difference between {pair}?",
            "Compare {pair} in a short table.",
            "Compare {pair} in three sentences.",
            "What do {pair} have in common, and what sets them apart?",
            "People often mix up {pair}. How do I tell them apart?",
            "Explain {pair} to {who} by contrasting them.",
        ),
        {"pair": _PAIRS, "who": AUDIENCES},
        SYSTEM,
        0.1,
    ),
    Family(
        "list",
        (
            "List {n} {things}.",
            "Give me {n} {things}.",
            "I need {n} {things}, each with a one-line explanation.",
            "Can you think of some unusual {things}?",
            "Write a numbered list of {n} {things}, best first.",
        ),
        {"things": _LISTED, "n": ["three", "five", "six", "eight", "ten"]},
        SYSTEM,
        0.1,
    ),
    Family(
        "role-play",
        (
            "Pretend you are {role}. {question}",
            "Answer as {role}: {question}",
            "Let's play a game. You are {role} and I am a visitor. {question}",
            "Stay in character as {role} and reply to me. {question}",
        ),
        {"role": _ROLES, "question": _QUESTIONS},
    ),
    Family(
        "persona",
        ("{question}", "Hello! {question}", "Excuse me. {question}", "Before I go: {question}"),
        {
            "role": _ROLES,
            "question": _QUESTIONS
            + words(
                "How did you learn your trade?|What do you think about rain?|Do you have any advice for young "
                "people?|What is in your bag?"
                "|Sing me a short song.|What is the strangest thing you have seen?|Who do you admire most?|How "
                "much does your help cost?"
            ),
        },
        ["You are {role}. Stay in character and answer in two or three sentences."],
        1.0,
    ),
    Family(
        "vocabulary",
        (
            "What does '{word}' mean?",
            "Use the word '{word}' in three different sentences.",
            "What is the opposite of '{word}'?",
            "Give me two synonyms for '{word}' and explain the difference in tone.",
            "Where does the word '{word}' come from?",
            "How would you explain '{word}' to {who}?",
        ),
        {"word": _WORDS, "who": AUDIENCES},
        SYSTEM,
        0.1,
    ),
    Family(
        "country-facts",
        (
            "What is the capital of {country}, and what is it known for?",
            "Tell me {n} facts about {country}.",
            "What food should I try in {country}?",
            "What is the climate like in {country}, and when should I visit?",
            "Which languages do people speak in {country}?",
            "What should a tourist know about manners in {country}?",
            "Describe the landscape of {country} in one paragraph.",
        ),
        {"country": _CAPITALS, "n": ["three", "five", "six"]},
        SYSTEM,
        0.1,
    ),
    Family(
        "recipe",
        (
            "How do I make {dish}?",
            "Give me a recipe for {dish}; {limit}.",
            "I want to make {dish}, but {limit}. What do you suggest?",
            "What ingredients do I need for {dish}?",
        ),
        {"dish": _DISHES, "limit": _LIMITS},
        SYSTEM,
        0.15,
    ),
    Family(
        "what-if",
        (
            "What would happen if {case}?",
            "Imagine that {case}. Describe an ordinary Monday.",
            "Write a short news report from a world where {case}.",
            "If {case}, which jobs would change the most?",
            "Name three good and three bad things that would follow if {case}.",
            "Suppose {case}. How would {who} react?",
        ),
        {
            "case": _IF,
            "who": ["teachers", "farmers", "doctors", "children", "politicians", "musicians", "shop owners", "pilots"],
        },
    ),
    Family(
        "fact-check",
        (
            "Is it true that {myth}?",
            "My friend says that {myth}. Is she right?",
            "Where does the idea that {myth} come from?",
            "Someone online claims that {myth}. How would I check that?",
            "True or false: {myth}. Explain briefly.",
            "I always believed that {myth}. {reply}",
        ),
        {
            "myth": _MYTHS,
            "reply": [
                "What does the evidence say?",
                "Was I wrong?",
                "Can you correct me in two sentences?",
                "How would you convince my dad otherwise?",
            ],
        },
        SYSTEM,
        0.15,
    ),
    *en_chat_write.FAMILIES,
    *en_chat_text.FAMILIES,
)
