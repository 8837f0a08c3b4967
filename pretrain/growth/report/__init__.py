"""``head-schedules growth report runs/NAME``: how heads grew, what the law predicts, and what each is
worth."""
