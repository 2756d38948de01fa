"""The web page in a real Chromium, before a real service: `make test-web`. What is promised of it, and the file and the
case that hold it to that (docs/operating/web-page.md is for its readers).

Stack        built into the wheel, its types are the API's, small      test_page_build
             first load
Overview     each kind of trouble first, missed objectives (RPO, RTO)  test_overview: what_needs_somebody
             and a late scrub among them, its link leads to where one
             acts
             live runs: age of the restore point, goodput              test_overview: live_runs
             bytes, cost with its prices, trends of a week, in words,  test_overview: trends_of_a_week
             lines and tables
             live: what is over leaves by itself                       test_overview: a_store_that_is_back
Run          lanes: saves, kill, lost steps, lineage; the same as a    test_run: lanes_show
             table
             a rollback is no kill; signs open their checkpoints       test_run: a_rollback, a_sign
             the metric over the same steps, with the branches that    test_run: the_metric
             the run has left; the steps narrowed
             restore point, why nothing newer, the command             test_run: the_restore_point
             attempts compared: configuration, environment             test_run: two_attempts
             goodput and advice; filters of checkpoints and of runs    test_run: goodput, the_filters, the_list
             goodput, bytes, age of the restore point hour by hour     test_run: hour_by_hour
             tags and note edited; the runs that have a tag            test_run: tags
             deleted by its name after a dry run, and back             test_run: a_run_is_deleted
Checkpoint   components, sizes, metrics, lineage                       test_checkpoint: components
             tensors: names, shapes, dtypes, shard map                 test_checkpoint: tensors
             copies by store with their proof; bad ones; scrub; drill  test_checkpoint: copies, a_bad_copy;
                                                                       test_screens: an_older_checkpoint
             health history, pin, hold and release                     test_checkpoint: a_persons_word, a_pin, a_hold
             metrics and labels edited; If-Match: another was faster   test_checkpoint: a_metric, an_edit
             commands for pull and restore                             test_checkpoint: the_commands
             compared: configuration, metrics, tensors by digest       test_checkpoint: two_checkpoints
             tensors measured: how far apart they are                  test_checkpoint: the_tensors_of_two
             found by a selector                                       test_checkpoint: a_metric, a_selector
Retention    effect of an edit: what goes, why, bytes, cost before     test_retention: an_edited_policy
             and after, and with which prices
             apply by the count, undo                                  test_retention: a_policy_is_applied
             a project's policy run by run; another person was faster  test_retention: a_projects_policy,
                                                                       another_persons_policy
             policies of copies, tiers and objectives                  test_retention: the_other_policies, what_a_store
             filter, dry run, selection, trash in bulk and back        test_retention: a_filter_prunes_what
             the same over several runs; one that fails                test_retention: a_filter_prunes_several,
                                                                       a_run_without
             trash of one checkpoint, by its count, and back           test_screens: a_checkpoint_goes;
                                                                       test_checkpoint: what_is_in_the_trash
             which run costs most                                      test_retention: the_dearest
Storage      stores, bad copies, scrub                                 test_storage: each_store, a_scrub
             second store, drill with RTO and RPO                      test_storage: the_second_store
             tiers, orphans, forecast to the quota                     test_storage: tiers, orphans, the_forecast
Operations   controllers; operations with progress and cancel          test_operations: a_controller, a_running
             events with filters by type, run and time, live           test_operations: events
             webhooks and what became of their calls                   test_operations: a_webhook
             tokens, projects and quotas, audit                        test_operations: a_token, a_project, the_audit
Every one    a link that can be sent, its title, nothing refused,      test_screens: a_link_opens; the fixture `screen`
             public calls
             alone, CSP, axe and layout in light, in dark and on a
             phone
             keyboard, dialogs and the focus                           test_screens: the_keyboard, a_dialog, no_key
             100,000 rows: those in sight alone, pages by cursor       test_page: a_long_table, a_row
             live by the event stream                                  test_screens: a_tab, a_commit
             local time, UTC on hover and focus                        test_page: moments
             a theme that is chosen, else the system's                 test_page: a_chosen_theme
             empty and error states                                    test_states
             phone                                                     test_page: a_phone; test_screens: a_link_opens
Tasks        an operator's five, from Overview by at most four clicks  test_tasks
Sign-in      token, one-time link, signing out, a token that is        test_sign_in
             revoked
             what a token may not is disabled, with the reason         test_screens: a_reader, a_projects_token
             another origin can do nothing, no script but the page's   test_other_pages
             files
"""
