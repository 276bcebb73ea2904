/* A staged block that moves between host and device memory while its flag lives on (shmring/flags.py), under a weak memory model.
 *
 * The daemon publishes the block with its host slot, copies it to the device slot, writes that number into the slot table, writes
 * the host slot's number back when it wants the device slot for another request, and reuses the device slot once nobody can know
 * its number.  It takes the flag back and publishes it again, in the device slot if the block is still there.  The engine takes the
 * flag, polls, claims, reads the entry, copies from the slot it names, un-claims or releases, and takes it again.  The host slot keeps the block as long as the flag pins it (flag.pml), so only the device slot's content
 * is modelled.  The exchange of the flag word itself is modelled as in flag.pml: atomic, and no order beyond release.
 *
 * Memory model.  The daemon's plain stores (device memory, table entry) go through a store buffer and reach memory in any order; a
 * fence and a release wait until they did.  The engine's plain loads return the value at its last acquire or fence, or the present
 * one.  Where a mutation takes an order away, the other order is a choice.  A wrong guess of a later load's value is no
 * execution (`pruned`).
 *
 * Checked: a claimed request that finds the device slot's number finds its own block there until it gives the claim up; the flag
 * always comes back (an invalid end state otherwise).
 * Mutations, each of which must make the check fail: the names M_* below (tests/models/test_models.py).
 */
#ifndef GENERATIONS
#define GENERATIONS 4
#endif

#define FREE 0
#define HINTED 1
#define READY 2
#define CLAIMED 3
#define RELEASED 4
#define WORD(generation, state) ((generation) * 8 + (state))
#define GENERATION(word) ((word) / 8)
#define STATE(word) ((word) % 8)

#define HOST 1
#define DEVICE 2
#define OTHER 255 /* another request's data */

/* memory: flag, the block's entry, the content of the device slot (the generation whose block it is) */
byte flag, entry, device = OTHER;
/* the daemon's store buffer */
byte v_entry, v_device;
bool b_entry, b_device;
/* memory as the engine's last acquire or fence left it */
byte e_entry, e_device;
bool locked; /* the daemon's exchange has the word; only the daemon's later stores can overtake it */
bool pruned;

#define DRAINED (!b_entry && !b_device)
#define STORE_ENTRY(value) atomic { v_entry = value; b_entry = true }
#define STORE_DEVICE(value) atomic { v_device = value; b_device = true }

active proctype memory()
{
end:
    do
    :: atomic { b_entry -> entry = v_entry; v_entry = 0; b_entry = false }
    :: atomic { b_device -> device = v_device; v_device = 0; b_device = false }
    od
}

/* where the daemon has the block beside the host slot */
#define NOWHERE 0
#define NAMED 1 /* the table names the device slot */
#define LEAVING 2 /* it did: whoever claimed before may still know the number */

active proctype daemon()
{
    byte word, serving, where;
    bool ok;
end:
    do
    :: !serving && STATE(flag) == HINTED -> /* publish */
        serving = GENERATION(flag);
        if
        :: where == NOWHERE -> STORE_ENTRY(HOST)
        :: else -> STORE_ENTRY(DEVICE) /* taken back before: the copy is complete, the release exchange is its SYNC copy */
        fi;
        /* SYNC flag: slot table and found word visible with the count (release exchange) */
        atomic { DRAINED -> assert(pruned || STATE(flag) == HINTED); flag = WORD(serving, READY) }
    :: serving && where == NOWHERE && STATE(flag) != RELEASED -> /* promote */
        STORE_DEVICE(serving);
        /* SYNC copy: the copy visible with the entry (fence) */
#ifndef M_PROMOTE_FENCE
        DRAINED;
#endif
        STORE_ENTRY(DEVICE);
        where = NAMED
    :: serving && where == LEAVING && STATE(flag) != RELEASED -> /* wanted again, and still there */
        STORE_ENTRY(DEVICE);
        where = NAMED
    :: serving && where == NAMED -> /* demote */
#ifdef M_LOOK_FIRST
        word = flag;
        STORE_ENTRY(HOST);
        DRAINED;
        where = LEAVING;
        if
        :: STATE(word) == READY -> STORE_DEVICE(OTHER); where = NOWHERE
        :: else
        fi;
        word = 0
#else
        STORE_ENTRY(HOST);
        /* SYNC claim: entry and claim cross (fence) */
#ifndef M_DEMOTE_FENCE
        DRAINED;
#endif
        where = LEAVING
#endif
    :: serving && where == LEAVING -> /* look whether anyone can know the number */
        /* SYNC slots: slots read before they are given up (acquire load) */
        word = flag;
        if
#ifdef M_LEAVE_CLAIMED
        :: STATE(word) == READY || STATE(word) == CLAIMED ->
#else
        :: STATE(word) == READY ->
#endif
            STORE_DEVICE(OTHER);
            where = NOWHERE
        :: else
        fi;
        word = 0
#ifdef M_LOOK_ACQUIRE
    :: serving && where == LEAVING && STATE(flag) == CLAIMED -> /* device slot reused before the load that finds READY */
        STORE_DEVICE(OTHER);
        atomic {
            STATE(flag) != CLAIMED ->
            if
            :: STATE(flag) == READY -> where = NOWHERE
            :: else -> goto wrong_guess
            fi
        }
#endif
    :: serving && STATE(flag) == READY -> /* take back */
        atomic {
            if
            :: STATE(flag) == READY && DRAINED -> locked = true; ok = true
            :: STATE(flag) != READY
            fi
        };
        if
        :: ok && where != NOWHERE -> STORE_DEVICE(OTHER); where = NOWHERE
        :: ok && where != NOWHERE -> where = NAMED /* kept as long as nobody needs the device slot */
        :: else
        fi;
        if
        :: ok -> atomic { flag = WORD(serving, HINTED); locked = false; serving = 0; ok = false }
        :: else
        fi
    :: !serving && where != NOWHERE -> STORE_DEVICE(OTHER); where = NOWHERE
    :: serving && STATE(flag) == RELEASED -> /* unpin, then free */
        if
        :: where != NOWHERE -> STORE_DEVICE(OTHER)
        :: else
        fi;
        atomic { flag = WORD(serving, FREE); serving = 0; where = NOWHERE }
    od;
wrong_guess:
    pruned = true;
    do
    :: ok = !ok
    od
}

#define ACQUIRE e_entry = entry; e_device = device
#define FORGET atomic { e_entry = 0; e_device = 0; word = 0; slot = 0; value = 0 }
#define LOAD(value, now, then) if :: value = now :: value = then fi
#define READ_ENTRY LOAD(slot, entry, e_entry); assert(pruned || slot == HOST || slot == DEVICE)

/* Nobody else makes a transition out of CLAIMED. */
#define LEAVE_CLAIM(state) atomic { assert(pruned || flag == WORD(generation, CLAIMED)); flag = WORD(generation, state) }

active proctype engine()
{
    byte generation, word, slot, value;
    do
    :: generation == GENERATIONS -> break
    :: else ->
        atomic { STATE(flag) == FREE -> generation++; flag = WORD(generation, HINTED) };
poll:
        /* SYNC flag: slot table and found word visible with the count (acquire load) */
        atomic { STATE(flag) == READY -> word = flag; ACQUIRE };
#ifdef M_CLAIM_FIRST
        READ_ENTRY;
#endif
        atomic {
            !locked ->
            if
            :: flag == word -> flag = WORD(generation, CLAIMED)
            :: else -> FORGET; goto poll
            fi
        };
        /* SYNC claim: entry and claim cross (fence) */
#ifndef M_CLAIM_FENCE
        atomic { true -> ACQUIRE };
#endif
#ifndef M_CLAIM_FIRST
        READ_ENTRY;
#endif
        /* SYNC copy: the copy visible with the entry (fence) */
#ifndef M_READ_FENCE
        atomic { true -> ACQUIRE };
#endif
        if
        :: slot == DEVICE -> LOAD(value, device, e_device); assert(pruned || value == generation)
        :: else
        fi;
        if
        :: true -> LEAVE_CLAIM(READY); FORGET; goto poll
        :: true -> LEAVE_CLAIM(RELEASED)
        fi;
        FORGET
    od;
    STATE(flag) == FREE /* it always comes back */
}
