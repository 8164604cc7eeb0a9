"""Short English texts for the families that work on a given text."""

from __future__ import annotations

PARAGRAPHS = [
    (
        "The town library closed its old reading room in March because the roof leaked. Volunteers moved "
        "nine thousand books to a school gym. Repairs took longer than planned, but the room reopened in "
        "October with new lamps and a small café."
    ),
    (
        "Honeybees tell each other where flowers are by dancing. The angle of the dance shows the "
        "direction, and its length shows the distance. Bees that watch the dance fly out and usually "
        "find the place within minutes."
    ),
    (
        "Maya started her bakery with one oven and a borrowed mixer. In the first year she sold bread "
        "only on Saturdays. Today she employs six people, and most of her flour comes from a mill twenty "
        "kilometres away."
    ),
    (
        "Last night's storm knocked down trees along River Street. About four hundred homes lost power, "
        "and the tram line was closed until noon. The city says most streets will be clear by Friday."
    ),
    (
        "A glacier is a large mass of ice that moves slowly under its own weight. As it moves, it "
        "scrapes the rock below and carries stones with it. When the ice melts, it leaves long ridges "
        "and round lakes behind."
    ),
    (
        "The new bus line connects the hospital, the university and the main station. Buses run every "
        "ten minutes on weekdays and every twenty minutes at weekends. Tickets cost the same as before, "
        "but paper tickets are no longer sold on board."
    ),
    (
        "Tomas wanted to quit the orchestra after his solo went wrong. His teacher asked him to play for "
        "the residents of a nursing home instead. An old man there cried at the slow part, and Tomas "
        "decided to stay."
    ),
    (
        "Many people think that deserts are always hot. In fact a desert is any place with very little "
        "rain, and some are covered in ice. The largest desert on Earth is in Antarctica."
    ),
    (
        "Our company will move to a new building on the first of June. Desks will be packed on the "
        "Thursday before, so please take personal things home by Wednesday evening. The help desk will "
        "be reachable by phone during the move."
    ),
    (
        "The octopus has three hearts and blue blood. Two hearts push blood through the gills, and the "
        "third sends it to the body. When the animal swims, the third heart stops, which may be why it "
        "prefers to crawl."
    ),
    (
        "In 1928 a scientist came back from holiday and noticed mould in one of his dishes. Around the "
        "mould the bacteria had died. That small accident led to one of the most important medicines of "
        "the century."
    ),
    (
        "Sleep researchers asked students to keep a diary for two weeks. Those who went to bed at the "
        "same time each night felt more rested, even when they slept for fewer hours. Screens in bed "
        "made little difference in this small group."
    ),
    (
        "The village of Arden had no shop for eleven years. Then the residents bought shares of fifty "
        "pounds each and opened one themselves. It sells milk, stamps and local cheese, and last year it "
        "made a small profit."
    ),
    (
        "Cork comes from the bark of an oak tree that grows around the Mediterranean. Workers peel the "
        "bark by hand every nine years without cutting the tree down. A single tree can be harvested for "
        "two centuries."
    ),
    (
        "Lina found a wallet in the park with two hundred euros in it. There was no address, only a "
        "photo of a dog. She put the picture on a notice board, and three days later the dog's owner "
        "called."
    ),
    (
        "Electric scooters were meant to replace short car trips. A survey of riders found that many "
        "would have walked instead. The city now plans fewer scooters in the centre and more near the "
        "outer stations."
    ),
    (
        "The museum's most popular object is not a painting but a clock from 1742. It shows the time, "
        "the tides and the phases of the moon. Every Sunday at eleven a restorer winds it by hand in "
        "front of visitors."
    ),
    (
        "To make the school greener, pupils counted how much food was thrown away at lunch. It was forty "
        "kilograms in one week. After they introduced small and large portions, the waste fell by half."
    ),
    (
        "A river in the north was straightened in the 1950s to protect fields from floods. Fish "
        "disappeared, and the floods moved downstream. Engineers are now giving the river its bends "
        "back, at a cost of nine million."
    ),
    (
        "The first marathon runners drank little or nothing. Some believed that water made them slow. "
        "Today every city race has tables with drinks, and doctors warn that too much water can also be "
        "dangerous."
    ),
    (
        "When the power failed, the restaurant did not close. The cooks lit candles, grilled fish "
        "outside and let guests pay what they liked. The owner now repeats the evening once a year."
    ),
    (
        "Paper was once made from old clothes. As more people learned to read, rags became scarce and "
        "expensive. Only when mills learned to use wood did newspapers become cheap."
    ),
    (
        "Dr. Okafor visits eleven villages with a clinic built into a van. Before the van came, some "
        "patients walked for five hours. The van carries a small laboratory, a fridge for vaccines and a "
        "satellite phone."
    ),
    (
        "Penguins recognise their partners by voice. In a colony of thousands, a returning parent calls "
        "and waits for the right answer. The chicks learn the call while they are still inside the egg."
    ),
    (
        "The team lost its first six matches of the season. A new coach cut training to four days and "
        "asked players to cook together once a week. They finished in the middle of the table, and "
        "nobody asked to leave."
    ),
    (
        "An app promised to find a parking space in under a minute. Users liked it, but drivers began to "
        "circle the same few streets. The developers now hide spaces that too many people are heading "
        "for."
    ),
    (
        "Salt was so valuable in some places that it was used to pay workers. Towns grew rich because "
        "they lay on the roads along which it was carried. Today it costs less than the box it is sold "
        "in."
    ),
    (
        "The apartment has two bedrooms, a balcony to the south and a shared garden. Heating is included "
        "in the rent, but electricity is not. Pets are allowed after talking to the owner."
    ),
    (
        "A student built a weather station from an old bicycle wheel and a phone. It measures wind, rain "
        "and light, and sends the values to her school every hour. Farmers nearby have started to ask "
        "for the data."
    ),
    (
        "Chess computers have beaten the best humans for years, yet chess is more popular than ever. "
        "Millions watch games online, and players use computers to study. The machine became a teacher "
        "rather than a replacement."
    ),
]

SENTENCES = [
    "The meeting starts at nine, so please be on time.",
    "I can't find my keys anywhere.",
    "We should plant more trees in our street.",
    "Could you send me the report by Friday?",
    "The soup is too salty, but the bread is excellent.",
    "My train was late because of the snow.",
    "She has been learning the piano for two years.",
    "Where can I buy a ticket for the museum?",
    "It was the best holiday of my life.",
    "Your order has been delayed by three days.",
    "I would like to book a room with a view of the sea.",
    "The children are playing in the garden.",
    "He forgot to close the window before the storm.",
    "This phone is cheaper, but its battery is weak.",
    "Thank you for your patience and your help.",
    "Nobody told me that the office was closed today.",
    "If it rains tomorrow, we will stay at home.",
    "I am afraid we have to cancel the concert.",
    "Do you want to have dinner with us on Saturday?",
    "The new teacher explains everything very well.",
    "Please turn off the lights when you leave.",
    "I spent the whole weekend repairing my bike.",
    "The price went up again last month.",
    "My grandfather tells the same joke every Christmas.",
    "You need to drink more water and get some rest.",
    "The bridge will be closed for repairs until May.",
    "I have never seen such a beautiful sunset.",
    "We ran out of coffee, and the shop is closed.",
    "Our team won the match in the last minute.",
    "Can you recommend a good book for the trip?",
    "The doctor said that there is nothing to worry about.",
    "Let me know when you arrive at the airport.",
    "The cat is asleep on my keyboard again.",
    "I prefer walking to taking the bus.",
    "The password must have at least twelve characters.",
    "We are looking for someone who speaks two languages.",
]

# a message, and one (about the same length) with mistakes in it
MESSAGES = [
    (
        "Hi, could we move our call from Tuesday to Thursday afternoon? Something came up at work.",
        "hi can we moved are call from tuesday to thursday? something come up at work",
    ),
    (
        "The washing machine you sold me leaks. I would like my money back.",
        "The washing mashine you sell me is leak. I want have my money back",
    ),
    (
        "Thanks again for watering my plants! I brought you some chocolate from Belgium.",
        "Thanks again for watering my plant's! I brang you some choclate from Belgium",
    ),
    (
        "Reminder: the rent for May has not arrived yet. Please transfer it this week.",
        "Remainder: the rent of may didnt arrive yet please to transfer this week",
    ),
    (
        "Would you like to join our book club? We meet on the first Monday of the month.",
        "Would you like join our book club, we are meeting at first monday of month",
    ),
    (
        "Your package is at the neighbour's house, number 14. Please pick it up today.",
        "You're package is by the neighbor, number 14. Please pick up it today",
    ),
    (
        "I'm sorry I missed your party. My bus broke down and my phone was dead.",
        "Im sorry I was miss you're party. My bus breaked down and my phone was death",
    ),
    (
        "We reviewed your application and would like to invite you to an interview next week.",
        "We have review your aplication and would like invite you for a interview in next week",
    ),
    (
        "The projector in room 204 does not turn on, and my talk starts in twenty minutes!",
        "the projecter in room 204 dont turns on and my talk is start in twenty minute!!",
    ),
    (
        "Can you lend me two hundred euros until the end of the month?",
        "Can you borrow me two hundred euros untill end of the month?",
    ),
    (
        "Just to let you know: the school trip is now on the 12th, not on the 10th.",
        "Just for let you know the school trip is now in the 12th not the 10th.",
    ),
    (
        "Your last report was excellent. The board was very pleased with the charts.",
        "You're last report was exelent, the board were very please with the chart's",
    ),
    (
        "I waited forty minutes for cold soup. Nobody apologised. I will not come back.",
        "I have waited fourty minutes for a cold soup. Nobody apologize. I dont come back no more",
    ),
    (
        "Are you free on Saturday? We need two more people for football.",
        "Are you free in saturday? we needs two more peoples for football",
    ),
    (
        "The hotel was clean, the staff were kind, and breakfast was better than expected.",
        "The hotel was cleaned, the staffs was kind and breakfast was more better than expected",
    ),
    (
        "Please don't park in front of the garage. The ambulance has to get through.",
        "Please don't parking in front the garage, ambulance have to get trough",
    ),
    (
        "Mum, I passed the driving test! Can I borrow the car on Sunday?",
        "mum i past the driving test!! can i lend the car at sunday",
    ),
    (
        "The new update deleted all my notes. How do I get them back?",
        "The new update have deleted all my note. How I can get it back",
    ),
    (
        "We are sorry to inform you that the workshop is full. You are on the waiting list.",
        "We are sorry for inform you that workshop is full, you are in the waiting list",
    ),
    (
        "Could you explain question 3 of the homework? I don't understand what 'net' means.",
        "Could you explain me the question 3 of homeworks? I dont understand what means 'net'",
    ),
    (
        "Dinner at ours tomorrow? Bring nothing but a good appetite.",
        "Diner at our's tomorrow? bring nothing but good apetite",
    ),
    (
        "The elevator is stuck again. This is the third time this month.",
        "The elevator is stucked again, this is third time in this months",
    ),
]
