"""Ways to tell people: webhook, Slack, e-mail, apprise."""
